"""Times rows that travel from the worker that made them to another worker, by transport and size.

    python benchmarks/row_transports.py [--pairs 5] [--transports simple mooncake] [--json out.json]

One call reads all rows on the other worker. `bare` is the same call on the worker that made them, so nothing travels.
Both workers run on this machine. simple and mooncake need `pip install 'unirl[transfer-queue]'`; mooncake travels over
TCP on loopback, with a `mooncake_master` that this program starts. With --transports, the file keeps the results of the
others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from harness import Ratio, paired, report

from tests.distributed.test_transfer_queue import master
from unirl.config.device_sets import DeviceSet
from unirl.distributed.group.dispatch import rank0
from unirl.distributed.group.handle import Remote
from unirl.distributed.group.pool import open_pool
from unirl.distributed.tensor.backend.transfer_queue.mooncake import ZeroCopy
from unirl.distributed.tensor.backend.transfer_queue.simple import SimpleBackend
from unirl.types.batch import Batch, row

KIB, MIB = 2**10, 2**20
SIZES = {KIB: 16, 64 * KIB: 16, MIB: 16, 16 * MIB: 4, 64 * MIB: 1, 256 * MIB: 1}
"""Bytes of a row to the number of rows of one call."""
TRANSPORTS = ("object_store", "collective", "simple", "mooncake", "mooncake copying")


@dataclass(kw_only=True, eq=False)
class HeavyRows(Batch):
    data: torch.Tensor = row(heavy=True)


class Holder:
    """Makes rows, or reads them."""

    @rank0
    def make(self, num_rows: int, num_bytes: int) -> HeavyRows:
        return HeavyRows(data=torch.randint(0, 256, (num_rows, num_bytes), dtype=torch.uint8))

    @rank0
    def read(self, rows: HeavyRows) -> int:
        return int(rows.data[-1, -1])


def holder(siblings: Any) -> Holder:
    return Holder()


@contextmanager
def options_of(transport: str) -> Iterator[dict[str, Any]]:
    """Yields the arguments of the pool for a transport."""
    if transport == "simple":
        yield {"row_service": SimpleBackend(num_units=2)}
    elif transport.startswith("mooncake"):
        with master() as (_, backend):
            zero_copy = ZeroCopy(enable=transport == "mooncake")
            sizes = {"global_segment_size_gb": 2.0, "local_buffer_size_gb": 0.5}
            yield {"row_service": replace(backend, zero_copy=zero_copy, **sizes)}
    else:
        yield {"row_transport": transport}


def measure(transport: str, pairs: int) -> list[Ratio]:
    with options_of(transport) as options, closing(open_pool("ray", 2, deadline_s=600.0, **options)) as pool:
        owner, reader = (pool.group(DeviceSet("device", (i,))).place(Remote("holder", holder)) for i in (0, 1))
        results = []
        for step, (size, number) in enumerate(SIZES.items()):
            pool.step = step
            rows = owner.make(number, size)
            shapes = {"row_bytes": size, "rows": number}
            before = pool.traffic
            result = paired(transport, shapes, lambda r=rows: reader.read(r), lambda r=rows: owner.read(r), pairs)
            result.shapes["driver_bytes_per_call"] = (pool.traffic - before) // (2 * pairs + 2)
            results.append(result)
            print(transport, size, number, result.ours_s, result.bare_s, flush=True)
            pool.release(step)
        return results


def kept(file: Path, transports: Sequence[str]) -> list[Ratio]:
    """Returns the results of a file for other transports than those that are measured."""
    if not file.exists():
        return []
    results = [Ratio(**result) for result in json.loads(file.read_text(encoding="utf-8"))["results"]]
    return [result for result in results if result.name not in transports]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--transports", nargs="*", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--json")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers
    torch.set_num_threads(1)
    results = [] if args.json is None else kept(Path(args.json), args.transports)
    for transport in args.transports:
        results += measure(transport, args.pairs)
        report(sorted(results, key=lambda result: TRANSPORTS.index(result.name)), args.json)


if __name__ == "__main__":
    main()
