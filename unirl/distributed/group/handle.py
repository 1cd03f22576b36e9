"""The driver's side of a role: how to build it, the workers that host it, and its methods, called at once or later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from unirl.distributed.group.dispatch import Call, Dispatch, remote_methods
from unirl.tracking.timing import Spans
from unirl.types.device import DeviceKind

if TYPE_CHECKING:
    from ray.actor import ActorHandle

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)
Siblings = Mapping[str, Any]
"""The roles of a worker, by name."""


@dataclass(frozen=True)
class Remote:
    """A named role and the function that builds it on its worker from its siblings."""

    name: str
    build: Callable[[Siblings], object]
    num_updates: int | None = None
    """U of the row layout of its scattered calls; None = that of the pool."""


@dataclass(frozen=True)
class PendingCall(Generic[ResultT_co]):
    """A remote call under way."""

    wait: Callable[[float], ResultT_co]
    """Waits until the call has made no progress for so many seconds."""
    deadline_s: float

    def result(self, deadline_s: float | None = None) -> ResultT_co:
        """The result. StallError (8001) after `deadline_s` seconds without progress (None: the group's deadline)."""
        return self.wait(self.deadline_s if deadline_s is None else deadline_s)


class Group(ABC):
    """Workers that host sibling roles, one rank each. How a call reaches them is the runtime's business."""

    workers: tuple[ActorHandle, ...] = ()
    """The actors, in rank order. Empty where roles live in this process."""
    spans: Spans | None = None
    """Records the calls of roles."""

    def __init__(self, name: str, num_ranks: int, deadline_s: float, connect_s: float) -> None:
        self.name = name
        self.connect_s = connect_s
        self.num_ranks = num_ranks
        self.deadline_s = deadline_s
        self.marks: dict[str, dict[str, Dispatch]] = {}
        self.num_updates: dict[str, int] = {}
        """U of the row layout of the roles that have one of their own."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The address of each rank's machine."""
        return ("127.0.0.1",)

    @abstractmethod
    def device_kind(self) -> DeviceKind:
        """The kind of the device with the least memory that a rank has."""

    def place(self, remote: Remote) -> Handle:
        """Build a role on every rank, beside its siblings, and return its handle."""
        role_class = self.build(remote)
        self.marks[remote.name] = remote_methods(role_class)
        if remote.num_updates is not None:
            self.num_updates[remote.name] = remote.num_updates
        return Handle(self, remote.name, role_class)

    @abstractmethod
    def build(self, remote: Remote) -> type:
        """Build a role on every rank, and return its class."""

    def role_here(self, role: str) -> object | None:
        """The object of a role when it lives in the driver's own process, else None."""
        return None

    @abstractmethod
    def submit(self, role: str, method: str, call: Call) -> PendingCall[Any]:
        """Start a call and return at once."""

    def run(self, role: str, method: str, call: Call) -> Any:
        """Call and wait."""
        return self.submit(role, method, call).result()


@dataclass(frozen=True)
class RemoteMethod:
    """One remote method of a role. Call it to wait for the result; give it to `submit` to wait later."""

    group: Group
    role: str
    name: str

    def __call__(self, *args: object, **kwargs: object) -> Any:
        spans = self.group.spans
        with nullcontext() if spans is None else spans.span(f"{self.role}.{self.name}", "call"):
            return self.group.run(self.role, self.name, (args, kwargs))


class Handle:
    """A role as the driver sees it. Only its methods that are marked as remote exist here.

    Code that calls a role is typed with the role's own class (see `unirl.trainer.assemble`), so that an editor and the
    type checker see the method that runs.
    """

    def __init__(self, group: Group, name: str, role_class: type) -> None:
        self.role_name = name
        self.group = group
        self.num_ranks = group.num_ranks
        self.methods = {method: RemoteMethod(group, name, method) for method in remote_methods(role_class)}

    def __getattr__(self, name: str) -> RemoteMethod:
        methods: dict[str, RemoteMethod] = self.__dict__.get("methods", {})  # absent while a copy of the handle is made
        if name not in methods:
            role = self.__dict__.get("role_name", "the role")
            raise AttributeError(f"{role!r} has no remote method {name!r}; it has {sorted(methods)}")
        return methods[name]


def submit(method: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> PendingCall[ResultT]:
    """Start a remote call and return at once: `submit(reward.score_and_attach, req, resp).result()`.

    Args:
        method: a method of a role that the driver holds by its handle.
    """
    remote = cast(RemoteMethod, method)
    pending: PendingCall[ResultT] = remote.group.submit(remote.role, remote.name, (args, kwargs))
    spans = remote.group.spans
    if spans is None:
        return pending
    return replace(pending, wait=spans.until_result(f"{remote.role}.{remote.name}", pending.wait))
