"""Keeps one env server running: start, wait until ready, notice its end, restart, give up.

A slot has a name ("math-0") and outlives its servers; each life of a server has its own process (unless it
runs elsewhere), address and link, which is opened once the address is known. Whatever ends a life (exit, silence, closed connection, a lease that
ran out) is seen by callbacks that fail its requests at once, also while nothing awaits here; `run` then
starts the next life after a pause that doubles from one failure to the next, until the budget is used up.
A server elsewhere is not restarted but reconnected to, again and again: how long an environment may be without any is
`absence`'s affair. A server that refuses us, or is not what it was, ends the start of a run, but later on it is lost
like any other.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from envs import wire
from envs.addresses import is_loopback
from envs.backoff import backoff_s
from orchestrator.env_servers.launcher import ServerProcess
from orchestrator.env_servers.link import Link, LinkListener, LinkState
from orchestrator.env_servers.spec import RestartPolicy
from orchestrator.errors import EnvError, EnvLostError, EnvProtocolError, EnvStartupError

log = structlog.get_logger()

_EXIT_S = 0.5
"""How long a process whose connection closed has to end before the connection is taken for the reason."""

STOP_GRACE_S = 5.0
"""Time a server has to end after SIGTERM before it is killed."""


class RestartBudget:
    """Counts restarts within the window; the pause doubles with each of them."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._restarts: deque[float] = deque()

    def next_delay_s(self, now: float) -> float | None:
        """Pause before the next restart, which is thereby taken; None when there is none left."""
        while self._restarts and self._restarts[0] <= now - self._policy.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._policy.max_restarts:
            return None
        self._restarts.append(now)
        return backoff_s(
            len(self._restarts), first_s=self._policy.first_delay_s, max_s=self._policy.max_delay_s
        )


class ServerParts(Protocol):
    """Makes the parts of a server's life; `launching` has the real one."""

    def start_process(self, server: str, life: int) -> ServerProcess | None:
        """Start the server's process; None when it runs elsewhere."""

    def known_address(self, server: str) -> str:
        """Where a server that runs elsewhere listens."""

    def open_link(self, server: str, address: str, listener: LinkListener) -> Link:
        """Connect to it; EnvProtocolError where that cannot even be tried."""

    def check_ready(self, server: str, ready: wire.Ready) -> None:
        """EnvProtocolError when the server is not what its siblings are."""

    def explain(self, log_tail: str) -> tuple[str, str]:
        """What the last lines of a server's log say in one, or nothing; and what of them to show below that."""


class Life:
    """One life of a server, from its start to its end. `ended` gets the reason, `ready` its declaration."""

    def __init__(self, slot: "ServerSlot", number: int) -> None:
        self._slot = slot
        self._loop = asyncio.get_running_loop()
        self.number = number
        self.ready: asyncio.Future[wire.Ready] = self._loop.create_future()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.refusal: EnvProtocolError | None = None
        self.process = slot.launcher.start_process(slot.name, number)
        if self.process is not None:
            self.process.exited.add_done_callback(self._on_exit)
        self.link: Link | None = None

    def open_link(self) -> None:
        """Begin the handshake as soon as the address is known; once."""
        if self.process is None:
            self._connect(self._slot.launcher.known_address(self._slot.name))
        elif self.process.address.done():
            self._connect(self.process.address.result())
        else:
            self.process.address.add_done_callback(lambda address: self._connect(address.result()))

    def _connect(self, address: str) -> None:
        if self.link is None and not self.ended.done():
            try:
                self.link = self._slot.launcher.open_link(self._slot.name, address, self)
            except EnvProtocolError as error:
                self.refusal = error
                self._end(error.what)

    def on_ready(self, link: Link, ready: wire.Ready) -> None:
        try:
            self._slot.launcher.check_ready(self._slot.name, ready)
        except EnvProtocolError as error:
            self.refusal = error
            link.close()
            self._end(error.what)
            return
        if not self.ready.done():
            self.ready.set_result(ready)
        self._slot.on_credit(False)

    def on_refused(self, link: Link, reason: str) -> None:
        self.refusal = EnvProtocolError(self._slot.env, f"server {self._slot.name} refused us: {reason}")
        self._end(reason)

    def on_lost(self, link: Link, reason: str) -> None:
        if self.process is None or not self.process.running:
            self._end(reason)
            return
        # A closed connection may be the first sign of a process that is ending; its exit says more.
        self._loop.call_later(_EXIT_S, self._end, reason)

    def on_credit(self, link: Link, *, told: bool) -> None:
        self._slot.on_credit(told)

    async def stop(self, *, grace_s: float, reason: str = "it was stopped") -> None:
        """End whatever is left of it."""
        if self.link is not None:
            self.link.close()
        if self.process is not None:
            await self.process.stop(grace_s=grace_s)
        self._end(reason)

    def _on_exit(self, _: asyncio.Future[int]) -> None:
        assert self.process is not None
        reason = self.process.ending()
        if self.link is not None:
            self.link.lose(reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
            self._slot.on_credit(False)


class ServerSlot:
    """One server of an environment, through all its lives."""

    def __init__(
        self,
        *,
        env: str,
        name: str,
        launcher: ServerParts,
        policy: RestartPolicy,
        ready_timeout_s: float,
        reconnect_timeout_s: float,
        on_credit: Callable[[bool], None],
    ) -> None:
        self.env = env
        self.name = name
        self.launcher = launcher
        self.on_credit = on_credit
        self.restarts = 0
        self._policy = policy
        self._budget = RestartBudget(policy)
        self._ready_timeout_s = ready_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._life: Life | None = None
        self._stopped = False

    @property
    def link(self) -> Link | None:
        return self._life.link if self._life is not None else None

    @property
    def process(self) -> ServerProcess | None:
        return self._life.process if self._life is not None else None

    @property
    def refusal(self) -> EnvProtocolError | None:
        """Why its server cannot be used, where that is known."""
        return self._life.refusal if self._life is not None else None

    @property
    def trouble(self) -> str:
        """Why a server elsewhere does not serve, after its address; empty while it does."""
        link = self.link
        if link is not None and link.state is LinkState.READY:
            return ""
        why = link.handshake_error if link is not None else ""
        if self.refusal is not None:
            why = self.refusal.what
        return f"{self.launcher.known_address(self.name)}: {why or 'it has not answered; does it run there?'}"

    @property
    def node(self) -> str:
        """The machine that the server runs on, or its address where it is not ours; empty on this machine."""
        if self.process is not None:
            return self.process.node
        return "" if self.link is None or is_loopback(self.link.address) else self.link.address

    def start(self) -> None:
        """Begin the next life: its process, if it is ours to start."""
        number = 0 if self._life is None else self._life.number + 1
        try:
            self._life = Life(self, number)
        except OSError as error:
            raise EnvStartupError(self.env, f"server {self.name} cannot be started: {error}") from None

    def connect(self) -> None:
        """Begin the handshake with a server that runs elsewhere; it becomes ready when it answers, whoever waits."""
        self.start()
        assert self._life is not None
        self._life.open_link()

    async def wait_ready(self) -> wire.Ready:
        """Connect and wait for the environment to be loaded; EnvStartupError or EnvProtocolError if it will not be."""
        if self._life is None:
            raise EnvError(self.env, "connect() needs servers: call spawn() first, or configure addresses")
        life = self._life
        life.open_link()
        milestones: list[asyncio.Future[Any]] = [life.ready, life.ended]
        await asyncio.wait(milestones, timeout=self._wait_s(life), return_when=asyncio.FIRST_COMPLETED)
        if life.ready.done():  # and perhaps lost again already, which `run` sees to
            log.info("env.ready", env=self.env, server=self.name, tasks=life.ready.result().tasks)
            return life.ready.result()
        if life.refusal is not None:
            raise life.refusal
        raise self._startup_error(life)

    async def run(self) -> None:
        """Restart the server whenever it ends, until cancelled; EnvLostError when the budget is used up.

        A server elsewhere has no budget: it is reconnected to until somebody says that it has left.
        """
        while True:
            life = self._life
            assert life is not None, "run() comes after connect()"
            await asyncio.wait([life.ended])
            if self._stopped:
                return
            await self._recover(life, life.ended.result())

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End the server; whoever awaits its requests gets failures."""
        self._stopped = True
        if self._life is not None:
            await self._life.stop(grace_s=grace_s)

    async def _recover(self, life: Life, reason: str) -> None:
        """Clear away what is left of a life and begin the next, after the pause that the budget asks for."""
        # A silent process would only sit out a grace period; a server elsewhere has no process.
        await life.stop(grace_s=0)
        exit_code = (
            life.process.exited.result() if life.process is not None and not life.process.running else None
        )
        log.warning("env.server_lost", env=self.env, server=self.name, reason=reason, exit_code=exit_code)
        delay = self._budget.next_delay_s(time.monotonic())
        if delay is None and life.process is not None:
            raise EnvLostError(self.env, self._describe_loss(life, reason))
        await asyncio.sleep(self._policy.max_delay_s if delay is None else delay)
        if self._stopped:
            return
        self.restarts += 1
        started = time.monotonic()
        try:
            self.start()
            await self.wait_ready()
        except (EnvStartupError, EnvProtocolError) as error:
            log.warning("env.restart_failed", env=self.env, server=self.name, why=str(error))
            if self._life is not None:
                await self._life.stop(grace_s=0, reason="it did not become ready")
            return
        took_s = round(time.monotonic() - started, 3)
        log.info("env.server_restarted", env=self.env, server=self.name, took_s=took_s)

    def _wait_s(self, life: Life) -> float:
        reconnecting = life.process is None and life.number > 0
        return self._reconnect_timeout_s if reconnecting else self._ready_timeout_s

    def _startup_error(self, life: Life) -> EnvStartupError:
        """Why a server is not ready, with the last words of its log."""
        if life.ended.done():
            what = f"server {self.name} did not start: {life.ended.result()}"
        else:
            what = f"server {self.name} not ready in {self._wait_s(life):g} s"
        if life.process is None:
            link = life.link
            address = link.address if link is not None else "?"
            why = link.handshake_error if link is not None and link.handshake_error else "does it run there?"
            return EnvStartupError(self.env, f"{what} at {address}; {why}")
        tail = life.process.log_tail()
        why, below = self.launcher.explain(tail)
        if not why and not life.ended.done():
            why = 'raise ready_timeout_s, or run "orchestrator env try" on it to see what it does'
        return EnvStartupError(
            self.env, "; ".join(filter(None, [what, why])) + below + _log_named(life.process)
        )

    def _describe_loss(self, life: Life, reason: str) -> str:
        tail = life.process.log_tail() if life.process is not None else ""
        said = last_lines(tail) + _log_named(life.process)
        return f"server {self.name} keeps dying and its restarts are used up ({reason}){said}"


def last_lines(tail: str) -> str:
    """The end of a log as it stands below a message."""
    return f"\nlast lines of its log:\n{tail}" if tail else ""


def _log_named(process: ServerProcess | None) -> str:
    return f"\nits log: {process.log_path}" if process is not None and process.log_path is not None else ""
