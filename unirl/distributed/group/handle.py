"""The driver's side of a role: its remote methods, each callable at once or as a call under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from unirl.distributed.group.dispatch import remote_methods
from unirl.distributed.group.remote import Remote

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class PendingCall(Protocol[ResultT_co]):
    """A remote call under way."""

    def result(self, deadline_s: float | None = None) -> ResultT_co:
        """The result. StallError (8001) when it has not come within `deadline_s` seconds (None: the group's)."""
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

    def submit(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingCall[Any]:
        """Start a call and return at once."""
        ...

    def run(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call and wait."""
        ...


@dataclass(frozen=True)
class RemoteMethod:
    """One remote method of a role. Call it to wait for the result; give it to `submit` to wait later."""

    group: Group
    role: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.group.run(self.role, self.name, args, kwargs)


class Handle:
    """A role as the driver sees it. Only its methods that are marked as remote exist here.

    Code that calls a role is typed with the role's own class (see `unirl.trainer.assemble`), so that an editor and the
    type checker see the method that runs.
    """

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


def submit(method: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> PendingCall[ResultT]:
    """Start a remote call and return at once: `submit(reward.score_and_attach, req, resp).result()`.

    Args:
        method: a method of a role that the driver holds by its handle.
    """
    remote = cast(RemoteMethod, method)
    return remote.group.submit(remote.role, remote.name, args, kwargs)
