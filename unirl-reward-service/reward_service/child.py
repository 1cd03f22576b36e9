"""A child process that answers messages one at a time, from the service's side of its socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from reward_service.frames import LENGTH, Message, PeerGone, frame_length, pack, unpack

BUFFER = 2**21
"""Bytes of a message that the system keeps for a receiver that has not read them yet."""


class Child:
    """A started process. Whoever starts it also kills it: an answer that is late leaves it in an unknown state."""

    def __init__(self, process: asyncio.subprocess.Process, ours: socket.socket) -> None:
        self._process, self._socket = process, ours
        self.ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Start `command`, to whose arguments the number of its end of the socket is appended.

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

    async def ask(self, message: Message, timeout_s: float) -> Message:
        """The answer to `message`.

        Raises:
            TimeoutError: it took longer; kill the child.
            PeerGone: the child ended, or its answer cannot be read.
        """
        async with asyncio.timeout(timeout_s):
            try:
                for buffer in pack(message):
                    await asyncio.get_running_loop().sock_sendall(self._socket, buffer)
                return unpack(await self._receive(frame_length(await self._receive(LENGTH))))
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
        """End the process at once, and wait until it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._socket.close()
        await self.ended

    async def death(self) -> str:
        """How it ended, for a message; waits a moment for the system to tell."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.ended), 1.0)
        if not self.ended.done():
            return "stopped answering"
        status = self.ended.result()
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
