"""The service's end of the socket to a child process, which answers one message at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from reward_service.frames import LENGTH, Message, PeerGone, frame_length, pack, unpack

BUFFER = 2**21
"""Size of the socket's send buffer in bytes."""


class Child:
    """A started process. Its owner must kill it after a late answer, since its state is then unknown."""

    def __init__(self, process: asyncio.subprocess.Process, ours: socket.socket) -> None:
        self._process, self._socket = process, ours
        self.ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Starts `command` with the descriptor of its end of the socket as an additional last argument.

        Its standard input stays open as long as this process lives. Raises FileNotFoundError or PermissionError.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=os.environ | dict(environment or {}),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_mb(self) -> float:
        """Returns the memory of the process in MiB; 0 where the system does not tell, or after its end."""
        with suppress(OSError):
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return 0.0

    async def ask(self, message: Message, timeout_s: float, reserve: Callable[[int], None] | None = None) -> Message:
        """Returns the answer to `message`.

        Args:
            reserve: is called with the number of bytes of the answer before they are read. What it raises is raised
                here; the caller must then kill the child.

        Raises:
            TimeoutError: the answer took longer than `timeout_s`. The caller must kill the child.
            PeerGone: the child ended, or its answer cannot be read.
        """
        async with asyncio.timeout(timeout_s):
            try:
                for buffer in pack(message):
                    await asyncio.get_running_loop().sock_sendall(self._socket, buffer)
                length = frame_length(await self._receive(LENGTH))
                if reserve is not None:
                    reserve(length)
                return unpack(await self._receive(length))
            except (OSError, msgspec.DecodeError) as error:
                raise PeerGone(str(error)) from error

    async def _receive(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, done = memoryview(buffer), 0
        while done < count:
            received = await asyncio.get_running_loop().sock_recv_into(self._socket, view[done:])
            if not received:
                raise PeerGone("the process closed its socket")
            done += received
        return buffer

    async def kill(self) -> None:
        """Kills the process and waits until it has ended."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._socket.close()
        await self.ended

    async def exit_status(self) -> int | None:
        """Returns the exit status, or minus the number of a signal. Waits up to 1 s for it; None if there is none."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.ended), 1.0)
        return self.ended.result() if self.ended.done() else None

    async def describe_end(self) -> str:
        """Returns how the process ended, for a message."""
        status = await self.exit_status()
        if status is None:
            return "stopped answering"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
