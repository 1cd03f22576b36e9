"""The driver's side of a role: its remote methods, each with a future form and a deadline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Protocol

from unirl.config.errors import StallError
from unirl.distributed.group.dispatch import remote_methods


class Group(Protocol):
    """Workers that host roles: how a call reaches them is the runtime's business."""

    def run(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def submit(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]: ...


@dataclass(frozen=True)
class Pending:
    """A call under way."""

    what: str
    future: Future[Any]

    def result(self, deadline_s: float | None = None) -> Any:
        """The result; StallError (8001), naming the call, when it has not come within `deadline_s` seconds."""
        try:
            return self.future.result(deadline_s)
        except FutureTimeout as timeout:
            if self.future.done():
                raise
            raise StallError(
                f"{self.what} gave no result within {deadline_s:g} s. Raise the deadline if it is only slow; "
                "`py-spy dump --pid <pid>` shows where every thread stands",
                code=8001,
            ) from timeout


@dataclass(frozen=True)
class RemoteMethod:
    """One remote method of a role: call it, or submit it and wait later."""

    group: Group
    role: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.group.run(self.role, self.name, args, kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Pending:
        """Start the call and return at once."""
        return Pending(
            f"{self.role}.{self.name}",
            self.group.submit(self.role, self.name, args, kwargs),
        )


class Handle:
    """A role as the driver sees it: only its marked methods exist here."""

    def __init__(self, group: Group, name: str, role: type) -> None:
        self.role_name = name
        self.methods = {method: RemoteMethod(group, name, method) for method in remote_methods(role)}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or name not in self.__dict__.get("methods", {}):
            raise AttributeError(
                f"{self.__dict__.get('role_name', 'the role')!r} has no remote method {name!r}; "
                f"it has {sorted(self.__dict__.get('methods', {}))}"
            )
        return self.methods[name]
