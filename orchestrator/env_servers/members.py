"""The servers of an environment that sources name: they join and leave while the others go on.

One that joins is greeted and checked like any other; it gets requests when it is ready and declares what the first
server did, and is tried again and again while it does not. One that leaves gets no new requests; it is let go when those
that it has have ended, or when it is gone itself, which fails them as retryable. Invariant: an address has one slot at
most; one that is named again before it is let go simply stays.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from orchestrator.discovery import Membership
from orchestrator.env_servers.link import LinkState
from orchestrator.env_servers.supervision import ServerSlot
from orchestrator.errors import EnvError, EnvStartupError

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Member:
    """One server that a source names, or has named."""

    address: str
    slot: ServerSlot
    leaving: bool = False
    attending: asyncio.Task[None] | None = None


class Members:
    """Servers by address. `build` makes the slot of a server elsewhere; `forget` is told of one that is let go."""

    def __init__(
        self,
        env: str,
        membership: Membership,
        *,
        build: Callable[[str], ServerSlot],
        forget: Callable[[ServerSlot], None],
        on_change: Callable[[], None],
        available: Callable[[], bool],
    ) -> None:
        """`available`: whether any server of the environment is ready."""
        self._env = env
        self._membership = membership
        self._build = build
        self._forget = forget
        self._on_change = on_change
        self._available = available
        self._members: dict[str, Member] = {}
        self._group: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self.refused: dict[str, str] = {}
        """By address why a server was not let in."""
        membership.on_join, membership.on_leave = self.join, self.leave

    @property
    def slots(self) -> list[ServerSlot]:
        """Of all of them, those that leave included."""
        return [member.slot for member in self._members.values()]

    @property
    def staying(self) -> int:
        """How many there should be."""
        return sum(not member.leaving for member in self._members.values())

    def join(self, address: str, source: str) -> None:
        """Greet a server; it gets requests once it is ready."""
        member = self._members.get(address)
        if member is not None:
            member.leaving = False
            if member.slot.link is not None:
                member.slot.link.retiring = False
            log.info("env.server_stays", env=self._env, server=member.slot.name, address=address)
        else:
            try:
                slot = self._build(address)
                slot.connect()
            except EnvError as error:
                self.refused[address] = error.what
                log.error("env.server_refused", env=self._env, address=address, source=source, why=error.what)
                return
            self._members[address] = member = Member(address, slot)
            log.info("env.server_joined", env=self._env, server=slot.name, address=address, source=source)
            self._attend(member)
        self._changed.set()
        self._on_change()

    def leave(self, address: str) -> None:
        """Give a server nothing new, and let it go when it has nothing left."""
        self.refused.pop(address, None)
        member = self._members.get(address)
        if member is None:
            return
        member.leaving = True
        link = member.slot.link
        log.info(
            "env.server_leaves",
            env=self._env,
            server=member.slot.name,
            address=address,
            inflight=link.inflight if link is not None else 0,
        )
        if link is not None:
            link.retire()
        self._changed.set()
        self._on_change()

    def settle(self) -> None:
        """Let go of those that leave and have nothing left, or are gone."""
        for member in [member for member in self._members.values() if member.leaving]:
            link = member.slot.link
            if link is None or link.state in (LinkState.LOST, LinkState.CLOSED):
                del self._members[member.address]
                if member.attending is not None:
                    member.attending.cancel()
                self._forget(member.slot)
                log.info("env.server_left", env=self._env, server=member.slot.name, address=member.address)

    async def wait_first(self, timeout_s: float) -> None:
        """Follow the sources, and attend to every server, until one is ready; EnvStartupError when none is in time."""
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as self._group:
                following = self._membership.follow(self._group)
                while not self._available():
                    self._changed.clear()
                    self._refuse_if_all_refuse()
                    await self._changed.wait()
                attending = [member.attending for member in self._members.values()]
                for task in [*following, *filter(None, attending)]:
                    task.cancel()
        except TimeoutError:
            raise EnvStartupError(
                self._env, f"no server was ready in {timeout_s:g} s; {self.explain()}"
            ) from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._group = None

    def _refuse_if_all_refuse(self) -> None:
        """Waiting does not help where every server that is named cannot be used."""
        refusals = [slot.refusal for slot in self.slots]
        if refusals and None not in refusals:
            raise EnvStartupError(self._env, "; ".join(one.what for one in refusals[:4] if one is not None))

    def explain(self) -> str:
        """Why there is no ready server: what the sources say, and what each server does."""
        if not self._members:
            return "; ".join([self._membership.explain(), *self.refused.values()])
        names = ", ".join(followed.source.text for followed in self._membership.sources)
        return f"{names} names {len(self._members)}: {troubles(self.slots)}"

    def look(self) -> None:
        """Something about a server changed."""
        self.settle()
        self._changed.set()

    async def run(self) -> None:
        """Follow the sources and attend to every server, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for member in self._members.values():
                    self._attend(member)
                self._membership.follow(group)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._group = None

    def _attend(self, member: Member) -> None:
        if self._group is not None:
            member.attending = self._group.create_task(
                self._keep(member.slot), name=f"attend {member.slot.name}"
            )

    async def _keep(self, slot: ServerSlot) -> None:
        """Reconnect to a server whenever its connection ends."""
        try:
            await slot.wait_ready()
        except EnvError as error:
            log.warning("env.server_refused", env=self._env, server=slot.name, why=error.what)
        await slot.run()


def troubles(slots: Sequence[ServerSlot]) -> str:
    """Why servers elsewhere do not serve: a few of them by name."""
    said = [trouble for slot in slots if (trouble := slot.trouble)]
    return "; ".join(said[:4]) + (f"; and {len(said) - 4} more" if len(said) > 4 else "")
