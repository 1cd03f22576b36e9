"""Fake servers of rollout engines in threads of the process of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from unirl.testing.conformance.sglang_llm import fake_sglang
from unirl.types.protocols import DtypeName


@contextmanager
def sglang(fault: str | None = None, *flags: str, seeds: bool = True, dtype: DtypeName = "fp32") -> Iterator[str]:
    """A fake SGLang server of the tiny Qwen3. Yields its address."""
    words = [*flags, "--enable-memory-saver", "--enable-weights-cpu-backup"]
    words += ["--enable-deterministic-inference"] if seeds else []
    server = fake_sglang("toy", 0, dtype, words, fault)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
