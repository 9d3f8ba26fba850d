"""Sources that are followed: looks in threads, names that hang, files that change."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from orchestrator.discovery import LookupFailed, Membership, Patience, Source, look_up, parse_source
from orchestrator.discovery.source import ENGINES, SERVERS
from tests.support.waiting import until

HASTY = Patience(look_every_s=0.001, look_within_s=10.0, leave_after_s=0.0, empty_after_s=0.0)


class Names:
    """What each source answers, or the error that it raises, as a test wants it; looks are counted."""

    def __init__(self, **answers: Iterable[str] | Exception) -> None:
        self.answers = answers
        self.looks: Counter[str] = Counter()

    def __call__(self, source: Source) -> list[str]:
        name = source.text.removeprefix("dns+tcp://").removesuffix(":7000")
        self.looks[name] += 1
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    async def looked(self, name: str, times: int = 2) -> None:
        """Return when a source was looked at anew, from beginning to end."""
        before = self.looks[name]
        await until(lambda: self.looks[name] >= before + times)


class Told:
    """Who is there, by what was told; everything told is kept."""

    def __init__(self, membership: Membership) -> None:
        self.there: dict[str, str] = {}
        self.events: list[tuple[str, str]] = []
        membership.on_join, membership.on_leave = self.join, self.leave

    def join(self, address: str, source: str) -> None:
        assert address not in self.there
        self.there[address] = source
        self.events.append(("join", address))

    def leave(self, address: str) -> None:
        del self.there[address]
        self.events.append(("leave", address))


@asynccontextmanager
async def following(
    look: Callable[[Source], list[str]], *names: str, listed: Iterable[str] = (), patience: Patience = HASTY
) -> AsyncIterator[tuple[Membership, Told]]:
    """A membership of these names, followed as long as the block lasts."""
    sources = [parse_source(f"dns+tcp://{name}:7000", SERVERS) for name in names]
    membership = Membership(sources, of="test", listed=listed, look=look, patience=patience)
    told = Told(membership)
    async with asyncio.TaskGroup() as group:
        tasks = membership.follow(group)
        try:
            yield membership, told
        finally:
            for task in tasks:
                task.cancel()


async def test_members_follow_the_answers() -> None:
    """Whoever is named joins, whoever is not any more leaves, and a failing look changes nothing."""
    names = Names(a=["1", "2"])
    async with following(names, "a") as (membership, told):
        await until(lambda: set(told.there) == {"1", "2"})
        assert membership.named_by("1") == "dns+tcp://a:7000"
        names.answers["a"] = ["2", "3"]
        await until(lambda: set(told.there) == {"2", "3"})
        names.answers["a"] = LookupFailed("no resolver")
        await names.looked("a")
        assert membership.explain() == "dns+tcp://a:7000: no resolver"
        assert set(told.there) == {"2", "3"}
        names.answers["a"] = []
        await until(lambda: not told.there)
        assert membership.named_by("2") == ""


async def test_whoever_is_named_twice_or_listed_leaves_with_the_last_of_them() -> None:
    """Two names may overlap, and a listed server never leaves by what a name answers."""
    names = Names(a=["1", "2", "listed"], b=["2"])
    async with following(names, "a", "b", listed=["listed"]) as (membership, told):
        await until(lambda: membership.complete and set(told.there) == {"1", "2"})
        names.answers["a"] = ["1"]
        await names.looked("a")
        assert set(told.there) == {"1", "2"}
        names.answers["b"] = ["4"]
        await until(lambda: set(told.there) == {"1", "4"})


async def test_answers_that_change_with_every_look_lose_nobody_and_double_nobody() -> None:
    """Many changes: joins and leaves of an address take turns (`Told` asserts it), and in the end the last answer holds."""
    looks = 0

    def look(source: Source) -> list[str]:
        nonlocal looks
        looks += 1
        return ["9"] if looks > 300 else [str((looks + n) % 7) for n in range(3)]

    async with following(look, "a") as (_, told):
        await until(lambda: looks > 302 and set(told.there) == {"9"})
        assert len(told.events) > 100


async def test_a_resolver_that_hangs_blocks_nobody_and_is_asked_once() -> None:
    """The loop goes on, other sources are followed, nobody leaves, and no second thread is started."""
    hold, threads = threading.Event(), threading.active_count()
    looks: Counter[str] = Counter()

    def look(source: Source) -> list[str]:
        looks[source.text] += 1
        if "slow" in source.text and looks[source.text] > 1:
            hold.wait()
        return [source.text[10:11]]

    patience = Patience(look_every_s=0.001, look_within_s=0.01, leave_after_s=0.0, empty_after_s=0.0)
    try:
        async with following(look, "slow", "quick", patience=patience) as (membership, told):
            slow = membership.sources[0]
            await until(lambda: slow.trouble == "its resolver does not answer")
            before = looks["dns+tcp://quick:7000"]
            await until(lambda: looks["dns+tcp://quick:7000"] > before + 5)
            assert looks["dns+tcp://slow:7000"] == 2
            assert threading.active_count() <= threads + 2
            assert set(told.there) == {"s", "q"}
            hold.set()
            await until(lambda: not slow.trouble)
    finally:
        hold.set()


async def test_it_can_be_followed_again_where_it_was_left() -> None:
    """A start follows, then the run does; nobody joins twice."""
    names = Names(a=["1"])
    sources = [parse_source("dns+tcp://a:7000", SERVERS)]
    membership = Membership(sources, of="test", listed=(), look=names, patience=HASTY)
    told = Told(membership)
    for count in (1, 2):
        names.answers["a"] = ["1", "2"][:count]
        async with asyncio.TaskGroup() as group:
            [task] = membership.follow(group)
            await until(lambda wanted=count: len(told.there) == wanted)  # type: ignore[misc]  # bound at once
            task.cancel()
    assert told.events == [("join", "1"), ("join", "2")]


def test_a_file_is_read_and_what_is_wrong_with_it_is_told(tmp_path: Path) -> None:
    """No file, a line that is no address, text that is none: each is a look of no use, which removes nobody."""
    source = parse_source("file:engines.txt", ENGINES, [tmp_path / "elsewhere", tmp_path])
    path = tmp_path / "engines.txt"
    with pytest.raises(LookupFailed, match=r"elsewhere/engines.txt cannot be read \(No such file"):
        look_up(source)
    path.write_text("http://a:8000/v1\nhttp://b:8000/v1  # the second\n")
    assert look_up(source) == ["http://a:8000/v1", "http://b:8000/v1"]
    path.write_text("http://a:8000/v1\nhttp://b:80")
    with pytest.raises(LookupFailed, match=r'engines.txt: line 2: "http://b:80" ends before its path'):
        look_up(source)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(LookupFailed, match=r"engines.txt"):
        look_up(source)
    path.write_text("# nobody\n")
    assert look_up(source) == []


@pytest.mark.parametrize(
    ("code", "found"), [(socket.EAI_NONAME, []), (socket.EAI_AGAIN, None), (socket.EAI_FAIL, None)]
)
def test_a_name_without_servers_is_told_from_a_resolver_that_fails(
    monkeypatch: pytest.MonkeyPatch, code: int, found: list[str] | None
) -> None:
    """NXDOMAIN is an empty answer; a resolver that cannot be reached is no answer."""

    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(code, "it says so")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    source = parse_source("dns+tcp://envs:7000", SERVERS)
    if found is None:
        with pytest.raises(LookupFailed, match="it says so"):
            look_up(source)
    else:
        assert look_up(source) == found


@pytest.mark.parametrize(
    ("numbers", "addresses"),
    [
        (["10.0.0.2", "fd00::2", "10.0.0.1", "10.0.0.1"], ["tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000"]),
        (["fd00::1"], ["tcp://[fd00::1]:7000"]),
    ],
)
def test_a_server_with_addresses_of_both_kinds_is_one_server(
    monkeypatch: pytest.MonkeyPatch, numbers: list[str], addresses: list[str]
) -> None:
    """IPv4 is taken where there is any, IPv6 where there is nothing else."""

    def resolve(host: str, port: int, **_: object) -> list[object]:
        assert (host, port) == ("envs", 7000)
        return [
            (socket.AF_INET6 if ":" in number else socket.AF_INET, 1, 6, "", (number, port))
            for number in numbers
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert look_up(parse_source("dns+tcp://envs:7000", SERVERS)) == addresses
