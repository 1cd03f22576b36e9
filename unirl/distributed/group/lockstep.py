"""Checks that all ranks of one group have equal devices, drivers and versions of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unirl.config.errors import UnsupportedEnvironmentError
from unirl.types.device import DeviceKind


def check_same_kind(group: str, kinds: Mapping[str, DeviceKind], allow_mixed: bool) -> None:
    """Refuses a group whose ranks have different devices, before any of them reads weights.

    Args:
        group: the devices of the group, as text.
        kinds: the place of each worker, as text -> the kind of its device.
        allow_mixed: devices and drivers may differ. Versions of torch may not, since each brings its own NCCL.

    Raises:
        UnsupportedEnvironmentError: 3002.
    """
    if len({kind.torch for kind in kinds.values()}) > 1:
        by_version = _grouped({worker: f"torch {kind.torch}" for worker, kind in kinds.items()})
        raise UnsupportedEnvironmentError(
            f"the ranks on {group} work in lockstep and have different versions of torch ({by_version}). "
            "Install the same versions on all machines: pip install -c constraints.txt -e ."
        )
    if allow_mixed or len({kind.comparable for kind in kinds.values()}) == 1:
        return
    by_kind = _grouped({worker: str(kind) for worker, kind in kinds.items()})
    raise UnsupportedEnvironmentError(
        f"the ranks on {group} work in lockstep and have different devices ({by_kind}). Each would wait for the "
        "slowest, and hold no more than the smallest. Give every role devices of one kind, such as "
        "placement={train: 0-3, rollout: 4-7}, leave the others out with CUDA_VISIBLE_DEVICES and num_devices, "
        "or accept the difference with allow_mixed_devices=true"
    )


def _grouped(texts: Mapping[str, str]) -> str:
    """`text: place, place; other text: place`."""
    workers: dict[str, Sequence[str]] = {}
    for worker, text in texts.items():
        workers[text] = [*workers.get(text, ()), worker]
    return "; ".join(f"{text}: {', '.join(where)}" for text, where in workers.items())
