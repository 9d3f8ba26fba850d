"""One environment as the service sees it: its servers, what they declared, and how to ask them for rollouts.

`spawn` starts the servers (or nothing, for servers elsewhere), `connect` waits until all are ready, `run`
supervises them until cancelled, `shutdown` ends them. `reserve` picks the least loaded server with room and
takes the room at once, `submit` sends a request there: what was planned can always be sent. Requests of a
server that goes away fail at once, as retryable. All servers of an environment must declare the same; sampling
arguments are computed once and travel in the handshake, not in requests. A group-scored environment is asked
for whole groups only. Servers that sources name come and go (`members`); what was planned on one that leaves still goes there.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import structlog
import zmq

from envs import wire
from envs.inference_client import raise_descriptor_limit
from orchestrator.discovery import Look, Membership, look_up
from orchestrator.dispatch.placement import least_loaded
from orchestrator.env_servers.absence import Absence
from orchestrator.env_servers.launching import ServerLauncher
from orchestrator.env_servers.link import Link
from orchestrator.env_servers.members import Members, troubles
from orchestrator.env_servers.requests import Answer, OnDone, RolloutRequest
from orchestrator.env_servers.spec import EnvSpec, RestartPolicy
from orchestrator.env_servers.supervision import STOP_GRACE_S, ServerSlot
from orchestrator.errors import EnvError

__all__ = [
    "Answer",
    "Env",
    "EnvSpec",
    "Envs",
    "EvalEnv",
    "EvalEnvs",
    "EvalSettings",
    "RestartPolicy",
    "RolloutRequest",
    "TrainEnv",
    "TrainEnvs",
    "TrainSettings",
]

log = structlog.get_logger()

Context = zmq.Context[zmq.Socket[bytes]]

_SOCKETS, _DESCRIPTORS = 65535, 8192
"""There may be many servers: three ZMQ sockets and four descriptors for each. The first is the most that libzmq takes."""


def _open_context() -> Context:
    """ZMQ's thread and sockets. Envs of one process share one: a thread for each would be woken by itself for every few messages."""
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _SOCKETS)
    return context


def _end_context(context: Context) -> None:
    # Closes what is still open too: ending a context waits for its sockets.
    context.destroy(linger=200)


class Env:
    """One environment: its servers and what they declared."""

    def __init__(self, spec: EnvSpec, *, look: Look = look_up) -> None:
        self.spec = spec
        self.membership = Membership(spec.sources, of=f'env "{spec.name}"', listed=spec.addresses, look=look)
        """Who the sources name."""
        self.on_free: Callable[[], None] = lambda: None
        """Called when room appears, or goes, other than by a request's end: a server became ready or was lost,
        a cancelled request stopped."""
        self._slots: list[ServerSlot] = []
        self._members = Members(
            spec.name,
            self.membership,
            build=self._build_member,
            forget=lambda slot: self._started.forget(slot.name),
            on_change=lambda: self._on_credit(False),
            available=lambda: self.available,
        )
        self._absence = Absence(spec.name, most_s=spec.reconnect_timeout_s, explain=self._explain_absence)
        self._numbers = itertools.count()
        self._links: list[Link] = []
        self._group_scored = False
        self._closed = False
        self._launcher: ServerLauncher | None = None
        self._own_context: Context | None = None
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def num_tasks(self) -> int | None:
        """Tasks in the split, None when unbounded; known once connected."""
        return self._declared.tasks.get(self.spec.split)

    @property
    def samples(self) -> Mapping[int, int]:
        """Digests of a few tasks of the split, by index; known once connected."""
        return self._declared.samples.get(self.spec.split, {})

    @property
    def group_scored(self) -> bool:
        """Whether rewards need the whole group; known once connected."""
        return self._declared.group_scored

    @property
    def inflight(self) -> int:
        """Rollouts in flight."""
        return sum(link.inflight for link in self._links)

    @property
    def available(self) -> bool:
        """Whether any server is ready."""
        for link in self._links:  # noqa: SIM110  asked for every env at every event, and three times as fast so
            if link.serving:
                return True
        return False

    @property
    def ready_servers(self) -> int:
        """Servers that take requests now."""
        return sum(link.serving for link in self._links)

    @property
    def restarts(self) -> int:
        """Restarts and reconnections of all servers so far."""
        return sum(slot.restarts for slot in self._all_slots)

    @property
    def servers(self) -> int:
        """Servers that there should be."""
        return len(self._slots) + self._members.staying

    @property
    def missing(self) -> str:
        """Why there is no server, where sources name them; empty where one is ready, or all are listed."""
        return self._members.explain() if self.membership and not self.available else ""

    def _explain_absence(self) -> str:
        """Why there is no server, listed ones included."""
        return "; ".join(filter(None, [troubles(self._slots), self.missing]))

    @property
    def _all_slots(self) -> list[ServerSlot]:
        return [*self._slots, *self._members.slots]

    @property
    def nodes(self) -> dict[str, str]:
        """Where ready servers run that are not on this machine, by server: the node, or the address."""
        ready = [slot for slot in self._all_slots if slot.link is not None and slot.link.serving]
        return {slot.name: slot.node for slot in ready if slot.node}

    def stats(self) -> dict[str, wire.ServerStats | None]:
        """The latest statistics of each server, by name."""
        return {slot.name: slot.link.stats if slot.link is not None else None for slot in self._all_slots}

    async def spawn(self, context: Context | None = None) -> None:
        """Start the servers; for servers elsewhere there is nothing to start. `context`: somebody else's, to be used."""
        if self._launcher is not None:
            raise EnvError(self.name, "spawn() was called already")
        if context is None:
            context = self._own_context = _open_context()
        raise_descriptor_limit(_DESCRIPTORS)
        self._launcher = ServerLauncher(self.spec, context, self._waiting)
        await self._launcher.prepare()
        count = len(self.spec.addresses) if self.spec.elsewhere else self.spec.workers
        self._slots = [self._slot(self._launcher, next(self._numbers)) for _ in range(count)]
        for slot in self._slots:
            slot.start()

    async def connect(self) -> None:
        """Wait until every server is ready; EnvStartupError or EnvProtocolError when one will not be.

        Of those that sources name, one is enough.
        """
        if self._launcher is None and self.spec.elsewhere:
            await self.spawn()
        if self._launcher is None:
            raise EnvError(self.name, "connect() needs servers: call spawn() first, or configure addresses")
        waits: list[Coroutine[Any, Any, object]] = [slot.wait_ready() for slot in self._slots]
        if self.membership:
            waits.append(self._members.wait_first(self.spec.ready_timeout_s))
        await side_by_side(waits)

    def join(self, address: str, source: str) -> None:
        """A source names a server: it is greeted, checked, and then gets requests."""
        self._members.join(address, source)

    def leave(self, address: str) -> None:
        """No source names a server any more: it gets nothing new, and is let go when what it has has ended."""
        self._members.leave(address)

    async def run(self) -> None:
        """Supervise the servers until cancelled; EnvLostError when one is beyond help, or all stay away elsewhere."""
        parts: list[Coroutine[Any, Any, object]] = [slot.run() for slot in self._slots]
        if self.spec.elsewhere:
            parts.append(self._absence.run())
        if self.membership:
            parts.append(self._members.run())
        await side_by_side(parts)

    async def drain(self) -> None:
        """Have every server finish what runs and accept nothing new."""
        await side_by_side(link.drain() for link in self._links)

    async def shutdown(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End every server, side by side, within the grace and a bounded wait; safe to call at any time."""
        self._closed = True
        try:
            await side_by_side(slot.stop(grace_s=grace_s) for slot in self._all_slots)
        finally:
            self._on_credit(False)
            if self._launcher is not None:
                await self._launcher.aclose()
            if self._own_context is not None:
                _end_context(self._own_context)
                self._own_context = None

    async def __aenter__(self) -> Self:
        """Spawn and connect; what was started is ended again when that fails."""
        try:
            await self.spawn()
            await self.connect()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def has_room(self, count: int) -> bool:
        """Whether one server has room for `count` rollouts."""
        for link in self._links:  # noqa: SIM110  asked for every rollout, and twice as fast so
            if link.has_room(count):
                return True
        return False

    def reserve(self, count: int) -> Link | None:
        """Take room for `count` rollouts on the least loaded server that has it; None when none has.

        The room is taken until a request is submitted with it and has ended, or until `release`.
        """
        best = least_loaded(self._links, count)
        if best is not None:
            best.reserve(count)
        return best

    def release(self, server: Link, count: int) -> None:
        """Give back room that was reserved and is not going to be used."""
        server.release(count)

    def submit(self, request: RolloutRequest, on_done: OnDone, *, server: Link) -> None:
        """Send a request to the server on which room for it was reserved.

        `on_done(request, answer)` is called exactly once, on the loop's thread and after this returned, unless
        the request is cancelled first. By then its room is free again. Where the server was lost since the room
        was reserved, the answer is the failure "server_lost".
        """
        if self._group_scored:
            request.group = True
        server.submit(request, on_done)

    def cancel(self, request: RolloutRequest) -> bool:
        """Stop a request; whether it was under way. Its `on_done` is not called; harmless when it has ended."""
        return request.link is not None and request.link.cancel(request)

    async def run_rollout(self, request: RolloutRequest) -> Answer:
        """Run one rollout and wait for it; cancelling this cancels the rollout."""
        if self.group_scored:
            raise EnvError(self.name, "it scores whole groups: use run_group()")
        if request.count != 1:
            raise ValueError(f"a rollout has a count of 1, got {request.count}")
        return await self._ask(request)

    async def run_group(self, request: RolloutRequest) -> Answer:
        """Run `count` rollouts of one task, scored together, and wait for them; cancelling this cancels them."""
        request.group = True
        return await self._ask(request)

    async def _ask(self, request: RolloutRequest) -> Answer:
        loop = asyncio.get_running_loop()
        while (server := self.reserve(request.count)) is None:
            if self._closed:
                return wire.Failure(0, "closed", f'env "{self.name}" was shut down', retryable=True)
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiting.append(waiter)
            await waiter
        done: asyncio.Future[Answer] = loop.create_future()

        def on_done(_: RolloutRequest, answer: Answer) -> None:
            if not done.done():
                done.set_result(answer)

        self.submit(request, on_done, server=server)
        try:
            return await done
        finally:
            self.cancel(request)  # harmless unless it is we who were cancelled

    def _on_credit(self, told: bool) -> None:
        """Room or readiness changed; `told` when a request's `on_done` has just said so."""
        if not told:
            self._members.look()
            self._links = [slot.link for slot in self._all_slots if slot.link is not None]
            self._absence.note(available=self.available)
            self._group_scored = self._launcher is not None and self._launcher.declared_group_scored
        if self._waiting:
            # All may look: the one with the smallest request need not be the first.
            waiting = self._waiting.copy()
            self._waiting.clear()
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)
        if not told:
            self.on_free()

    @property
    def _declared(self) -> wire.Ready:
        return self._started.ready

    @property
    def _started(self) -> ServerLauncher:
        if self._launcher is None:
            raise EnvError(self.name, "not connected yet: what it is, its servers declare")
        return self._launcher

    def _build_member(self, address: str) -> ServerSlot:
        number = next(self._numbers)
        self._started.place(f"{self.name}-{number}", address)
        return self._slot(self._started, number)

    def _slot(self, launcher: ServerLauncher, number: int) -> ServerSlot:
        return ServerSlot(
            env=self.name,
            name=f"{self.name}-{number}",
            launcher=launcher,
            policy=self.spec.restart,
            ready_timeout_s=self.spec.ready_timeout_s,
            reconnect_timeout_s=self.spec.reconnect_timeout_s,
            on_credit=self._on_credit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What the service wants to know of a training environment beside its servers."""

    ratio: float | None
    group_size: int
    min_batch_allocation: float
    max_inflight: int | None
    rollouts_per_minute: float | None


class TrainEnv(Env):
    """An environment to train on."""

    def __init__(self, spec: EnvSpec, settings: TrainSettings) -> None:
        super().__init__(spec)
        self.settings = settings


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """What is evaluated, how often each task is tried, and every how many steps."""

    num_examples: int | None
    rollouts_per_example: int
    interval: int


class EvalEnv(Env):
    """An environment to evaluate on."""

    def __init__(self, spec: EnvSpec, settings: EvalSettings) -> None:
        super().__init__(spec)
        self.settings = settings

    @property
    def examples(self) -> int:
        """Tasks of one evaluation: as configured, or all there are."""
        wanted, there = self.settings.num_examples, self.num_tasks
        if there is None and wanted is None:
            raise EnvError(self.name, "its tasks have no end: set num_examples")
        if there == 0:
            # An evaluation ends with its last task, so that one of no tasks would never end.
            raise EnvError(self.name, f'split "{self.spec.split}" has no tasks; name another, or remove it')
        return min(count for count in (wanted, there) if count is not None)


AnyEnv = TypeVar("AnyEnv", bound=Env)


class Envs(Mapping[str, AnyEnv], Generic[AnyEnv]):
    """Environments by name, started and stopped side by side."""

    def __init__(self, envs: Sequence[AnyEnv]) -> None:
        self._envs = {env.name: env for env in envs}
        if len(self._envs) != len(envs):
            names = [env.name for env in envs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(
                f"environments must have unique names; more than one is called {', '.join(twice)}"
            )
        self._context: Context | None = None

    def __getitem__(self, name: str) -> AnyEnv:
        return self._envs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._envs)

    def __len__(self) -> int:
        return len(self._envs)

    async def spawn(self) -> None:
        """Start all servers; they load while this returns."""
        self._context = _open_context()
        for env in self._envs.values():
            await env.spawn(self._context)

    async def connect(self) -> None:
        """Wait until every server of every environment is ready."""
        await side_by_side(env.connect() for env in self._envs.values())

    async def run(self) -> None:
        """Supervise all servers until cancelled; the first environment beyond help ends it with its error."""
        await side_by_side(env.run() for env in self._envs.values())

    async def shutdown(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End all servers."""
        try:
            await side_by_side(env.shutdown(grace_s=grace_s) for env in self._envs.values())
        finally:
            if self._context is not None:
                _end_context(self._context)
                self._context = None


class TrainEnvs(Envs[TrainEnv]):
    """The environments to train on."""


class EvalEnvs(Envs[EvalEnv]):
    """The environments to evaluate on."""


async def side_by_side(coroutines: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run them together; the first error cancels the rest and is raised as it is, not as a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
