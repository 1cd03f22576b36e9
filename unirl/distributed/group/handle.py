"""The driver's side of a role: its remote methods, each with a future form and a deadline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from unirl.distributed.group.dispatch import remote_methods
from unirl.distributed.group.remote import Remote


class Pending(Protocol):
    """A call under way."""

    def result(self, deadline_s: float | None = None) -> Any:
        """The result; StallError (8001) when it has not come within `deadline_s` seconds (the group's, if absent)."""
        ...


class Group(Protocol):
    """Workers that host sibling roles, one rank each. How a call reaches them is the runtime's business."""

    name: str
    num_ranks: int
    deadline_s: float

    @property
    def workers(self) -> tuple[Any, ...]:
        """The actors, in rank order; none where roles live in this process."""
        ...

    @property
    def hosts(self) -> tuple[str, ...]:
        """The address of each rank's machine."""
        ...

    def place(self, remote: Remote) -> Handle:
        """Build a role on every rank, beside its siblings, and give its handle."""
        ...

    def role_here(self, role: str) -> Any | None:
        """The object of a role when it lives in the driver's own process, else None."""
        ...

    def submit(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending:
        """Start a call and return at once."""
        ...

    def run(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call and wait."""
        ...


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
        return self.group.submit(self.role, self.name, args, kwargs)


class Handle:
    """A role as the driver sees it: only its marked methods exist here."""

    def __init__(self, group: Group, name: str, role_class: type) -> None:
        self.role_name = name
        self.num_ranks = group.num_ranks
        self.methods = {method: RemoteMethod(group, name, method) for method in remote_methods(role_class)}

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("__") or name not in self.__dict__.get("methods", {}):
            raise AttributeError(
                f"{self.__dict__.get('role_name', 'the role')!r} has no remote method {name!r}; "
                f"it has {sorted(self.__dict__.get('methods', {}))}"
            )
        return self.methods[name]
