"""Checks of what the methods of a loss return. A loss may be the code of a user, so every value may be wrong.

Each check raises PluginError (2031) with the class, the file and line of the method, the value and the rule. The checks
look at types and shapes alone, so nothing waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from unirl.config.errors import PluginError, UniRLError, did_you_mean
from unirl.config.failures import is_out_of_memory
from unirl.config.plugins import contract_of, definition, explained, is_foreign, summary
from unirl.tracking.metrics import METRICS, is_metric
from unirl.types.protocols import Anchor, Needs, Quantity
from unirl.types.results import Metric, Metrics
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import Segment

if TYPE_CHECKING:
    from jaxtyping import Float

METRIC = "A metric is a unirl.types.results.Metric of one detached number, such as Metric.mean(value.detach().mean())"
WITH_GRAPH = "Compute it from the outputs of the network, without detach()"
QUANTITIES = get_args(Quantity)


def broken(loss: object, method: str, found: str, rule: str) -> PluginError:
    """The error of a method that returned what its contract does not allow.

    Args:
        found: what it returned.
        rule: what it must return.
    """
    return PluginError(
        "\n  ".join(
            [f"{definition(type(loss), method)}: {method} returned {found}. {rule}", *contract_of(type(loss), method)]
        )
    )


def shown(value: object) -> str:
    """A value in the words of a message: `a tensor of shape [2, 1]`, `a tuple of 3`, `None`."""
    match value:
        case None:
            return "None"
        case Tensor():
            return f"a tensor of shape {list(value.shape)}"
        case tuple():
            return f"a tuple of {len(value)}"
    return f"{type(value).__name__} {str(value)[:40]!r}"


@contextmanager
def computing(loss: object, method: str) -> Iterator[None]:
    """Names the loss of a user in an error that its method causes in our code, such as a part that is not recorded."""
    try:
        yield
    except UniRLError:
        raise
    except Exception as error:  # the method is foreign code, which may make anything fail
        if not is_foreign(type(loss)) or is_out_of_memory(error) or explained(error) is not None:
            raise
        contract = contract_of(type(loss), method)
        raise PluginError(
            "\n  ".join([f"{definition(type(loss), method)}: computing its {method}: {summary(error)}", *contract])
        ) from error


def elements_of(
    loss: object, method: str, value: object, shape: Sequence[int], has_graph: bool
) -> tuple[Float[Tensor, "*elements"], Metrics]:
    """The losses per element and the metrics that `method` returned.

    Args:
        shape: one number for each element, [B, S].
        has_graph: the losses must have a gradient.
    """
    rule = f"It must return (losses, metrics): a tensor of shape {list(shape)} and a dict"
    if not isinstance(value, tuple) or len(value) != 2:
        raise broken(loss, method, shown(value), rule)
    losses, metrics = value
    check_elements(loss, method, losses, shape, has_graph, name="losses", rule=rule)
    check_metrics(loss, method, metrics)
    return losses, metrics


def check_elements(
    loss: object, method: str, value: object, shape: Sequence[int], has_graph: bool, name: str = "", rule: str = ""
) -> None:
    """A value of `method` must be a tensor with one number for each element.

    Args:
        name: the value, if the method returns several.
        rule: the rule, if the method has one of its own.
    """
    named = f"{name} as " if name else ""
    if not isinstance(value, Tensor) or value.shape != torch.Size(shape):
        rule = rule or f"It must be a tensor of shape {list(shape)}: one number for each element"
        raise broken(loss, method, named + shown(value), rule)
    if has_graph and not value.requires_grad:
        raise broken(loss, method, f"{named}{shown(value)} without a gradient", WITH_GRAPH)


def check_metrics(loss: object, method: str, metrics: object) -> None:
    """Metrics must be a dict of `Metric` by names that a run knows, each of one detached number."""
    if not isinstance(metrics, dict):
        raise broken(loss, method, f"metrics as {shown(metrics)}", f"It must be a dict, {{}} without metrics. {METRIC}")
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise broken(loss, method, f"a metric named {name!r}", "A name is text: custom/<name>")
        if not is_metric(name):
            raise broken(loss, method, f"the metric {name!r}", f"Name it custom/<name>.{did_you_mean(name, METRICS)}")
        if not isinstance(metric, Metric):
            raise broken(loss, method, f"the metric {name!r} as {shown(metric)}", METRIC)
        for part, number in (("total", metric.total), ("weight", metric.weight), ("squares", metric.squares)):
            if not isinstance(number, Tensor) or number.dim() or number.requires_grad:
                _check_number(loss, method, f"the metric {name!r} with a {part} that is", part, number)


def _check_number(loss: object, method: str, found: str, part: str, number: object) -> None:
    """The error of a part of a metric that is not a detached tensor of one number, unless it is such a float."""
    if isinstance(number, Tensor):
        if number.dim():
            raise broken(loss, method, f"{found} {shown(number)}", METRIC)
        if number.requires_grad:
            raise broken(loss, method, f"{found} not detached", METRIC)
    elif not isinstance(number, (int, float)):
        raise broken(loss, method, f"{found} {shown(number)}", METRIC)
    elif part == "weight" and not 0.0 <= number < math.inf:
        raise broken(loss, method, f"{found} {number}", "The weight of a metric is the number of its elements, >= 0")


def check_outputs(loss: object, method: str, outputs: object, quantities: Collection[str]) -> None:
    """Outputs must be detached tensors by quantity, with those that live anchors read."""
    rule = f"It must return a dict of detached tensors, here of {', '.join(sorted(quantities)) or 'no quantity'}"
    if not isinstance(outputs, dict):
        raise broken(loss, method, f"outputs as {shown(outputs)}", rule)
    for quantity in quantities:
        if quantity not in outputs:
            raise broken(loss, method, f"no output {quantity!r}, which an anchor reads", rule)
    for quantity, value in outputs.items():
        if not isinstance(value, Tensor) or value.requires_grad:
            kept = " that is not detached" if isinstance(value, Tensor) else ""
            raise broken(loss, method, f"the output {quantity!r} as {shown(value)}{kept}", rule)


def check_total(loss: object, value: object) -> None:
    """The loss of a part must be one number with a gradient."""
    rule = "It must be a tensor of shape [], the sum over all elements"
    if not isinstance(value, Tensor) or value.dim():
        raise broken(loss, "loss", f"a loss that is {shown(value)}", rule)
    if torch.is_grad_enabled() and not value.requires_grad:
        raise broken(loss, "loss", "a loss without a gradient", WITH_GRAPH)


def parts_of(loss: Any, segment: Segment) -> list[tuple[int, ...]]:
    """The parts of a loss, which must be a list of tuples of numbers."""
    with computing(loss, "parts"):
        parts = loss.parts(segment)
    if not isinstance(parts, list) or not all(
        isinstance(part, tuple) and part and all(isinstance(entry, int) for entry in part) for part in parts
    ):
        raise broken(loss, "parts", shown(parts), "It must return a list of tuples of numbers, such as [(0,), (1,)]")
    return parts


def count_of(loss: Any, rows: RolloutTrack) -> float:
    """The weighted number of elements of a loss, which must be finite and not negative."""
    with computing(loss, "count"):
        count = loss.count(rows)
    if not isinstance(count, (int, float)) or not 0.0 <= count < math.inf:
        found = str(count) if isinstance(count, (int, float)) else shown(count)
        raise broken(
            loss, "count", found, "It must return a finite number >= 0, the sum of the weights of all elements"
        )
    return count


def check_quantities(loss: object, method: str, names: object, known: Sequence[str] = QUANTITIES) -> None:
    """Quantities must be a tuple of names, all of them in `known`."""
    if not isinstance(names, (tuple, list, set, frozenset)) or not all(name in known for name in names):
        found = shown(names) if names is None or isinstance(names, str) else str(names)
        raise broken(loss, method, found, f'It must return a tuple of {", ".join(known)}, such as ("logp",)')


def check_declarations(loss: Any) -> None:
    """Checks what a loss declares before anything is built: its anchors and its needs."""
    anchors, rule = loss.anchors(), 'It must return a dict of anchors, such as {"old_logp": Anchor("live", "logp")}'
    if not isinstance(anchors, Mapping):
        raise broken(loss, "anchors", shown(anchors), rule)
    for name, anchor in anchors.items():
        if not isinstance(anchor, Anchor):
            raise broken(loss, "anchors", f"{name!r} as {shown(anchor)}", rule)
        check_quantities(loss, "anchors", (anchor.quantity,))
    if not isinstance(loss.needs, Needs):
        raise broken(loss, "needs", shown(loss.needs), "It must return unirl.types.protocols.Needs")
