"""Several ranks on this machine: processes that start with everything imported, joined by gloo."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.processes import forkserver
from unirl.distributed import RankInfo, current
from unirl.distributed.group.rank import running_as

DEADLINE_S = 600.0


def run_ranks(num: int, fn: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
    """`fn(*args)` on `num` ranks; what each gave back, tensors as numpy arrays. The first failure is raised here."""
    context = forkserver()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(num)]
    processes = [
        context.Process(target=_rank, args=(pipes[rank][1], store.port, rank, num, fn, args), daemon=True)
        for rank in range(num)
    ]
    for process in processes:
        process.start()
    for _, write in pipes:
        write.close()
    try:
        return _results([read for read, _ in pipes], time.monotonic() + deadline_s)
    finally:
        for process in processes:
            process.kill()
            process.join(10)


@contextmanager
def fsdp_events() -> Iterator[list[str]]:
    """The names under which FSDP2 shows profilers its gathers, reductions and prefetches within the block, in order.

    A profiler would record every operation of PyTorch with them, which takes far longer than the block.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as places

    names: list[str] = []
    plain = places.record_function

    def recorded(name: str) -> AbstractContextManager[object]:
        names.append(name)
        return plain(name)

    places.record_function = recorded  # type: ignore[misc, assignment]
    try:
        yield names
    finally:
        places.record_function = plain  # type: ignore[misc]


def _results(pipes: list[Connection], deadline: float) -> list[Any]:
    result: dict[int, Any] = {}
    while len(result) < len(pipes):
        open_ones = [pipe for rank, pipe in enumerate(pipes) if rank not in result]
        ready = wait(open_ones, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(set(range(len(pipes))) - result.keys())} gave no result in time")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                error, result[rank] = pipe.recv()
            except EOFError:
                error = "it died without a word"
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
    return [result[rank] for rank in range(len(pipes))]


def _rank(pipe: Connection, port: int, rank: int, num: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=num, timeout=timedelta(seconds=DEADLINE_S)
    )
    group = torch.distributed.group.WORLD
    info = RankInfo(rank=rank, world_size=num, dp_rank=rank, dp_size=num, group=group if num > 1 else None)
    try:
        with running_as(info):
            result = plain(fn(*args))
        pipe.send(("", result))
        torch.distributed.barrier()
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    torch.distributed.destroy_process_group()


def own(count: int) -> list[int]:
    """The rows of this rank."""
    share = count // current().dp_size
    return list(range(current().dp_rank * share, (current().dp_rank + 1) * share))


def gathered(rows: Tensor) -> Tensor:
    """The rows of all ranks, in order."""
    if current().dp_size == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(current().dp_size)]
    torch.distributed.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def assert_two_ranks_train_as_one(policy: Callable[..., list[Any]], *options: Any, same_bits: bool) -> None:
    """`policy(*options)` gives equal numbers and weights on one rank and on each of two.

    Args:
        policy: trains on the rows `own`. Returns gathered tensors, the norms of the gradients as floats, and last the
            trained weights by name.
        same_bits: the first number, computed before the first update, is equal to the bit.
    """
    [alone] = run_ranks(1, policy, *options)
    *numbers, weights = alone
    assert min(number for number in numbers if isinstance(number, float)) > 0
    for *others, trained in run_ranks(2, policy, *options):
        for first, second in zip(numbers, others, strict=True):
            np.testing.assert_allclose(second, first, rtol=1e-5, atol=1e-6)
        assert not same_bits or np.array_equal(others[0], numbers[0])
        assert weights.keys() == trained.keys()
        assert all(np.abs(value - trained[name]).max() < 1e-4 for name, value in weights.items())


def plain(value: Any) -> Any:
    """Tensors as numpy arrays, so that a result outlives its process."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value
