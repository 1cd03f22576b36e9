"""A pool of devices and the groups of workers that live on it."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from operator import methodcaller
from typing import Any

from unirl.config.errors import ConfigError
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.rank import RankInfo, running_as
from unirl.distributed.group.remote import Remote
from unirl.distributed.tensor.transport import ColumnStore


class LocalGroup:
    """One worker in the driver's own process: calls run inline, so a breakpoint works."""

    def __init__(self, owner: str, store: ColumnStore) -> None:
        self.owner = owner
        self.store = store
        self.roles: dict[str, Any] = {}
        self.rank = RankInfo()
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=owner)

    def place(self, remote: Remote) -> Handle:
        """Build a role beside its siblings and give its handle."""
        if remote.name in self.roles:
            raise ConfigError(f"role {remote.name!r} is placed twice on {self.owner}", code=2004)
        with running_as(self.rank):
            self.roles[remote.name] = remote.build(self.roles)
        return Handle(self, remote.name, type(self.roles[remote.name]))

    def run(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of a role: columns become tensors on the way in, heavy fields columns on the way out."""
        args, kwargs = self.store.fetch(args), self.store.fetch(kwargs)
        with running_as(self.rank):
            result = methodcaller(method, *args, **kwargs)(self.roles[role])
        return self.store.stash(result, self.owner)

    def submit(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """The same, on the group's own thread."""
        return self.executor.submit(self.run, role, method, args, kwargs)

    def close(self) -> None:
        """End all roles."""
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.roles.clear()


class DevicePool:
    """Devices to place roles on. The local pool has one worker, in this process."""

    def __init__(self, num_devices: int = 1) -> None:
        if num_devices != 1:
            raise ConfigError(
                f"num_devices={num_devices} needs more than one worker, and runtime: local has one process. "
                "Set num_devices=1",
                code=2020,
            )
        self.num_devices = num_devices
        self.store = ColumnStore()
        self.groups: list[LocalGroup] = []

    def group(self) -> LocalGroup:
        """A new group of workers on all devices."""
        group = LocalGroup(f"local-{os.getpid()}-{len(self.groups)}", self.store)
        self.groups.append(group)
        return group

    def clear(self) -> None:
        """End all roles and keep the devices."""
        for group in self.groups:
            group.close()
        self.groups.clear()
        self.store.clear()
