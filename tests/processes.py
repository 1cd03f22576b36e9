"""Processes that tests start, and whether they still run."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

# One server serves the whole session, so whoever comes first decides for all. The large libraries are lazy: importing
# one imports nothing of what a model needs.
PRELOAD = ["unirl.cli.train", "unirl.trainer.assemble", "unirl.train.stack", "unirl.train.backend.fsdp"]
PRELOAD += ["unirl.algorithms.diffusion_grpo", "unirl.models.sd3.family"]
PRELOAD += ["diffusers.models.autoencoders", "diffusers.models.transformers.transformer_sd3", "diffusers.loaders.peft"]
PRELOAD += ["diffusers.schedulers.scheduling_flow_match_euler_discrete", "transformers.models.clip.modeling_clip"]
PRELOAD += ["transformers.models.clip.tokenization_clip", "transformers.models.t5.modeling_t5"]
PRELOAD += ["transformers.models.t5.tokenization_t5", "peft", "torch._dynamo", "torch.distributed.checkpoint"]
PRELOAD += ["tests.toy", "tests.warm_ray", "pytest", "tests.frozen"]


def forkserver() -> ForkServerContext:
    """Starts processes that find everything imported, over which a fresh interpreter takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def like_this(
    target: Callable[..., object], *args: object, environ: Mapping[str, str] | None = None
) -> ForkServerProcess:
    """Starts a process of `forkserver` and gives it the environment variables that this process has now.

    Args:
        environ: environment variables to add.
    """
    process = forkserver().Process(target=_in_environment, args=({**os.environ, **(environ or {})}, target, args))
    process.start()
    return process


def _in_environment(environ: dict[str, str], target: Callable[..., object], args: Sequence[object]) -> None:
    from tests.warm_ray import use_warm_workers

    os.environ.clear()
    os.environ.update(environ)
    use_warm_workers()
    target(*args)


def run_python(words: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit status and output of `python *words` in `folder`: a script or `-m` and a module, each with its arguments.

    Args:
        environ: environment variables to add.
    """
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "output"
        process = like_this(_run_python, list(words), folder, output, environ=environ)
        process.join()
        assert process.exitcode is not None
        return process.exitcode, output.read_text()


def _run_python(words: list[str], folder: Path, output: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    become(words, output)


def become(words: Sequence[str], output: Path) -> None:
    """Run `python *words` in this process. Its output is appended to a file."""
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    module, arguments = (words[1], words[2:]) if words[0] == "-m" else ("", words[1:])
    sys.argv = [module or words[0], *arguments]
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which the end of an interpreter runs, and that of such a process does not


@contextmanager
def process_of(words: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that has ended after the block, also where the block fails: a plain `Popen` would wait for its end.

    Args:
        settings: further arguments of `Popen`.
    """
    with subprocess.Popen(words, text=True, **settings) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # which lets it end its children
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                process.kill()


def is_running(pid: int) -> bool:
    """Whether a process exists that is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may also end between opening the file and reading it
        return False
    return state not in ("Z", "X")


def wait_until(what: Callable[[], object], seconds: float) -> bool:
    """Whether `what` became true in time."""
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(what())
