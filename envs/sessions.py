"""The clients of a server: handshakes, leases, and which request belongs to whom.

Takes messages in and says what to send and what to start through two callbacks; does no I/O and has no
clock of its own. Invariants: a request that was accepted is answered exactly once, unless its client has gone;
a client that says nothing for the length of its lease, leaves, or says hello on another connection has its
requests cancelled; no client has more rollouts in flight than the capacity that it was told, and the number of
clients is bounded.
"""

import os
import socket
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import structlog

from envs import wire
from envs.errors import EnvironmentLoadError
from envs.loader import parse_id
from envs.model import ModelSettings

log = structlog.get_logger()

MAX_CLIENTS = 64
MAX_LEASE_S = 600.0


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request under way. `reason` is why it was cancelled; `cancel` stops it."""

    request: wire.Request
    session: "Session"
    cancel: Callable[[], object] = lambda: None
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.session.hello.client} {self.request.kind} {self.request.id} of {self.request.split}/{self.request.index}"


@dataclass(slots=True, eq=False)
class Session:
    """One client on one connection."""

    route: bytes
    hello: wire.Hello
    settings: ModelSettings
    expires: float
    requests: dict[int, ActiveRequest] = field(default_factory=dict)
    inflight: int = 0
    draining: bool = False
    closed: bool = False


class Sessions:
    """All clients of one server. Times are seconds of the caller's clock."""

    def __init__(
        self,
        *,
        env: str,
        capacity: int,
        send: Callable[[bytes, list[bytes]], bool],
        start: Callable[[ActiveRequest], None],
        key_variables: Collection[str] = (),
    ) -> None:
        self._env = env
        self._capacity = capacity
        self._send = send
        self._start = start
        self._key_variables = frozenset(key_variables)
        self._sessions: dict[bytes, Session] = {}
        self._count_tasks: Callable[[str], int | None] | None = None
        self._sample_tasks: Callable[[str], dict[int, int]] = lambda split: {}
        self._group_scored = False
        self._stopping = False
        self.done = 0
        self.failed = 0
        self.malformed = 0

    @property
    def inflight(self) -> int:
        """Rollouts in flight."""
        return sum(session.inflight for session in self._sessions.values())

    def running(self) -> list[str]:
        """Names of the requests under way; safe to call from the watchdog's thread."""
        return [
            active.name
            for session in list(self._sessions.values())
            for active in list(session.requests.values())
        ]

    def stats(self, *, loop_lag_s: float, rss_bytes: int) -> wire.ServerStats:
        """How the server is doing."""
        return wire.ServerStats(self.inflight, self.done, self.failed, self.malformed, loop_lag_s, rss_bytes)

    def loaded(
        self,
        *,
        count_tasks: Callable[[str], int | None],
        group_scored: bool,
        sample_tasks: Callable[[str], dict[int, int]] = lambda split: {},
        capacity: int | None = None,
    ) -> None:
        """The environment can be used: tell everyone who waits. `capacity` is its own limit, if it has one."""
        if capacity is not None:
            self._capacity = max(1, min(self._capacity, capacity))
        self._count_tasks = count_tasks
        self._sample_tasks = sample_tasks
        self._group_scored = group_scored
        for session in list(self._sessions.values()):
            self._say_ready(session)

    def on_message(
        self, route: bytes, frames: list[bytes], *, now: float, stats: Callable[[], wire.ServerStats]
    ) -> None:
        """Act on a message from the connection `route`."""
        session = self._sessions.get(route)
        try:
            protocol = session.hello.protocol if session is not None else wire.version_of(frames)
            message = wire.decode_to_server(frames, protocol)
        except wire.WireError as error:
            self._on_malformed(route, error)
            return
        if isinstance(message, wire.Hello):
            self._on_hello(route, message, now)
            return
        if session is None:
            # Its lease ended, or it spoke to a server that was here before; a goodbye needs no answer.
            if not isinstance(message, wire.Bye):
                self._send(route, [wire.encode(wire.Expired())])
            return
        session.expires = now + min(session.hello.lease_s, MAX_LEASE_S)
        if isinstance(message, wire.Request):
            self._on_request(session, message)
        elif isinstance(message, wire.Cancel):
            active = session.requests.get(message.id)
            if active is not None:
                _stop(active, "cancelled")
        elif isinstance(message, wire.Ping):
            self._send(route, [wire.encode(wire.Pong(message.sent, stats()))])
        elif isinstance(message, wire.Drain):
            session.draining = True
            self._say_drained(session)
        else:
            self.end(session, "the client left")

    def on_done(self, active: ActiveRequest, frames: list[bytes], *, failed: bool) -> None:
        """A request ended; its answer leaves unless the client has gone."""
        session = active.session
        del session.requests[active.request.id]
        session.inflight -= active.request.count
        if session.closed:
            return
        self.done += 1
        if active.reason:
            frames, failed = [wire.encode(_cancelled(active))], True
        self.failed += failed
        if not self._send(session.route, frames):
            self.end(session, "the client does not take its results")
            return
        self._say_drained(session)

    def beat(self, *, now: float, stats: wire.ServerStats) -> None:
        """Every second: end expired leases, and let every client see that the server is alive."""
        pong = [wire.encode(wire.Pong(0.0, stats))]
        for session in list(self._sessions.values()):
            if now >= session.expires:
                self.end(session, f"nothing heard for {min(session.hello.lease_s, MAX_LEASE_S):g} s")
            elif not self._send(session.route, pong):
                self.end(session, "the connection is closed")

    def end(self, session: Session, why: str) -> None:
        """Forget a client and cancel what runs for it."""
        if self._sessions.get(session.route) is session:
            del self._sessions[session.route]
        session.closed = True
        level = log.warning if session.requests else log.info
        level("client.left", client=session.hello.client, why=why, cancelled=len(session.requests))
        _stop_all(session.requests.values(), "client_gone")

    def stop(self) -> None:
        """The server ends: cancel everything; every request is still answered, and nothing is begun for anybody."""
        self._stopping = True
        for session in self._sessions.values():
            session.draining = True
            _stop_all(session.requests.values(), "server_stopping")

    def _on_malformed(self, route: bytes, error: wire.WireError) -> None:
        self.malformed += 1
        if self.malformed <= 20 or self.malformed % 1000 == 0:
            log.warning("frame.malformed", why=str(error)[:500], count=self.malformed)
        if error.protocol is not None and error.protocol not in wire.VERSIONS:
            self._refuse(route, _other_protocol("a client", error.protocol))
        elif error.request_id is not None and route in self._sessions:
            failure = wire.Failure(error.request_id, "malformed_request", str(error)[:500], retryable=False)
            self._send(route, [wire.encode(failure)])

    def _on_hello(self, route: bytes, hello: wire.Hello, now: float) -> None:
        known = self._sessions.get(route)
        if known is not None and known.hello != hello:
            self.end(known, "it said another hello")
            known = None
        if known is None:
            reason, key = self._objection(hello)
            if reason:
                self._refuse(route, reason)
                return
            for other in [s for s in self._sessions.values() if s.hello.client == hello.client]:
                self.end(other, "it came back on another connection")
            settings = ModelSettings(hello.model, hello.sampling, hello.system_prompt, key, hello.train)
            known = self._sessions[route] = Session(route, hello, settings, 0.0)
            log.info("client.welcomed", client=hello.client)
        known.expires = now + min(hello.lease_s, MAX_LEASE_S)
        self._send(
            route, [wire.encode(wire.Welcome(hello.protocol, self._env, os.getpid(), socket.gethostname()))]
        )
        self._say_ready(known)

    def _objection(self, hello: wire.Hello) -> tuple[str, str | None]:
        """Why a client cannot be served (or nothing), and the API key it asked to use."""
        key = None
        if hello.protocol not in wire.VERSIONS:
            return _other_protocol(hello.client, hello.protocol), None
        if canonical_id(hello.env) != canonical_id(self._env):
            return (
                f'client {hello.client} asks for environment "{hello.env}", this server has "{self._env}"',
                None,
            )
        if len(self._sessions) >= MAX_CLIENTS:
            return f"this server has {MAX_CLIENTS} clients already", None
        if hello.api_key_env:
            if hello.api_key_env not in self._key_variables:
                # A client must not be able to have any variable of this host sent to a URL of its choice.
                return f"this server was not allowed to use the API key in {hello.api_key_env}", None
            key = os.environ.get(hello.api_key_env)
            if key is None:
                return f"{hello.api_key_env} is not set where this server runs", None
        try:
            ModelSettings(hello.model, hello.sampling, hello.system_prompt, None, hello.train)
        except ValueError as error:
            return str(error), None
        return "", key

    def _refuse(self, route: bytes, reason: str) -> None:
        log.warning("client.refused", reason=reason)
        self._send(route, [wire.encode(wire.Refused(wire.PROTOCOL, reason))])

    def _say_ready(self, session: Session) -> None:
        if self._count_tasks is None:
            return
        tasks: dict[str, int | None] = {}
        samples: dict[str, dict[int, int]] = {}
        for split in session.hello.splits:
            try:
                tasks[split] = self._count_tasks(split)
                if sampled := self._sample_tasks(split):
                    samples[split] = sampled
            # The environment's own code: whatever it raises for a split, exit() included, is a reason to refuse the client.
            except BaseException as error:
                log.exception("split.failed", split=split)
                self._refuse(
                    session.route, f'environment "{self._env}" has no split "{split}": {error!r}'[:2000]
                )
                self.end(session, "it asked for a split that there is not")
                return
        ready = wire.Ready(self._env, tasks, self._group_scored, self._capacity, samples, models=True)
        self._send(session.route, [wire.encode(ready)])

    def _say_drained(self, session: Session) -> None:
        if session.draining and not session.requests:
            self._send(session.route, [wire.encode(wire.Drained())])

    def _on_request(self, session: Session, request: wire.Request) -> None:
        refusal = ""
        if request.id in session.requests:
            self.malformed += 1
            return
        if self._count_tasks is None:
            refusal = "the environment is still loading"
        elif session.draining or self._stopping:
            refusal = "the server is draining"
        elif session.inflight and session.inflight + request.count > self._capacity:
            refusal = f"{session.inflight} of {self._capacity} rollouts are in flight already"
        if refusal:
            failure = wire.Failure(request.id, "not_accepted", refusal, retryable=True)
            self._send(session.route, [wire.encode(failure)])
            return
        active = session.requests[request.id] = ActiveRequest(request, session)
        session.inflight += request.count
        self._start(active)


def canonical_id(env: str) -> str:
    """An environment's id without the split, spelt in full; what is no id stays as it is."""
    try:
        identity = parse_id(env)
    except EnvironmentLoadError:
        return env
    return f"{identity.loader}::{identity.name}" if identity.loader else identity.name


def _stop(active: ActiveRequest, reason: str) -> None:
    """Cancel once: a second cancellation would hit the clean-up of the first."""
    if not active.reason:
        active.reason = reason
        active.cancel()


def _stop_all(requests: Iterable[ActiveRequest], reason: str) -> None:
    for active in list(requests):
        _stop(active, reason)


def _cancelled(active: ActiveRequest) -> wire.Failure:
    message = {"cancelled": "cancelled by the client", "server_stopping": "the server is stopping"}
    return wire.Failure(
        active.request.id,
        active.reason,
        message.get(active.reason, active.reason),
        retryable=active.reason == "server_stopping",
    )


def _other_protocol(client: str, protocol: int) -> str:
    return f"{client} speaks protocol {protocol}, this server speaks {wire.spoken()}; use the same release on both sides"
