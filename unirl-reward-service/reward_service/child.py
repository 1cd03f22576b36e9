"""A child process that answers messages one at a time, from the service's side of its socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from reward_service.frames import LENGTH, Lost, Message, frame_length, pack, unpack

BUFFER = 2**22
"""Bytes that are read before the sender has to wait."""


class Child:
    """A started process. Whoever starts it also kills it: an answer that is late leaves it in an unknown state."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Start `command`, to whose arguments the number of its end of the socket is appended.

        Its standard input stays open as long as this process lives. Raises FileNotFoundError or PermissionError.
        """
        ours, theirs = socket.socketpair()
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
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=BUFFER)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, message: Message, timeout_s: float | None) -> Message:
        """The answer to `message`.

        Raises:
            TimeoutError: it took longer; kill the child.
            Lost: the child ended, or its answer cannot be read.
        """
        async with asyncio.timeout(timeout_s):
            try:
                self._writer.writelines(pack(message))
                await self._writer.drain()
                length = frame_length(await self._reader.readexactly(LENGTH))
                return unpack(await self._reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError) as error:
                raise Lost(str(error)) from error

    async def kill(self) -> None:
        """End the process at once, and wait until it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._writer.close()
        await self.ended

    async def death(self) -> str:
        """How it ended, for a message; waits a moment for the system to tell."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.ended), 1.0)
        if not self.ended.done():
            return "stopped answering"
        status = self.ended.result()
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
