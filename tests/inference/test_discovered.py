"""Inference servers that sources name: they join with the newest weights, leave when they are not named, and lose nothing."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import structlog

from orchestrator.discovery import LookupFailed, Membership, Patience, Source, parse_source
from orchestrator.discovery.source import ENGINES
from orchestrator.inference import Endpoint, InferenceError, InferencePool
from orchestrator.inference.engine import EngineUnfitError
from tests.support.inference_engine import ScriptedEngine, folder_of_weights
from tests.support.inference_pool import build_pool, running, until, watched

SOURCE = "dns+http://vllm.rl.svc:8000/v1"
HASTY = Patience(look_every_s=0.001, look_within_s=10.0, leave_after_s=0.0, empty_after_s=0.0)


class Name:
    """A name in DNS, and who is behind it."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        self.error: LookupFailed | None = None
        self.name(*engines)

    def name(self, *engines: ScriptedEngine) -> None:
        """Who is behind it from now on."""
        self.urls: Iterable[str] = [engine.base_url for engine in engines]

    def look(self, _: Source) -> list[str]:
        if self.error is not None:
            raise self.error
        return list(self.urls)

    def pool(self, *listed: ScriptedEngine, **options: Any) -> InferencePool:
        """A pool of whoever is behind the name, beside those that are listed."""
        urls = [engine.base_url for engine in listed]
        membership = Membership(
            [parse_source(SOURCE, ENGINES)], of="inference", listed=urls, look=self.look, patience=HASTY
        )
        return build_pool(*listed, membership=membership, **options)


async def test_whoever_is_named_at_the_start_gets_work() -> None:
    """The limit is shared by those that are there, and the status can say where each comes from."""
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        pool = Name(first, second).pool(limit=12)
        async with running(pool) as wait:
            await wait(lambda: len(pool.ready) == 2)
            assert {endpoint.source for endpoint in pool.endpoints} == {SOURCE}
            assert ([endpoint.limit for endpoint in pool.endpoints], pool.limit) == ([6, 6], 12)


async def test_one_that_joins_gets_the_newest_weights_before_its_first_rollout(tmp_path: Path) -> None:
    """As one that was added by hand does."""
    weights = str(folder_of_weights(tmp_path))
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        name = Name(first)
        pool = name.pool(update="vllm", limit=12)
        async with running(pool) as wait:
            await pool.update_weights(3, weights)
            name.name(first, second)
            await wait(lambda: len(pool.ready) == 2)
            assert (second.weights, pool.endpoints[1].version) == (weights, 3)


async def test_one_that_is_not_named_any_more_ends_what_it_has(tmp_path: Path) -> None:
    """It gets nothing new; named again in time, it stays; otherwise it is gone with its last rollout."""
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        name = Name(first, second)
        pool = name.pool(limit=12)
        async with running(pool) as wait:
            await wait(lambda: len(pool.ready) == 2)
            leaving = pool.endpoints[1]
            assert {pool.acquire(1), pool.acquire(1)} == set(pool.endpoints)
            name.name(first)
            await wait(lambda: leaving.leaving)
            assert leaving not in pool.ready
            name.name(first, second)
            await wait(lambda: leaving in pool.ready)
            name.name(first)
            await wait(lambda: leaving.leaving)
            assert leaving in pool.endpoints
            pool.release(leaving, 1)
            assert leaving not in pool.endpoints


async def test_one_that_is_gone_before_its_rollouts_end_gives_them_back() -> None:
    """It is not named any more and does not answer either: its rollouts are asked elsewhere."""
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        name = Name(first, second)
        pool = name.pool()
        lost: list[Endpoint] = []

        def give_back(endpoint: Endpoint) -> None:
            lost.append(endpoint)
            pool.release(endpoint, endpoint.inflight)

        pool.on_lost = give_back
        async with running(pool) as wait:
            await wait(lambda: len(pool.ready) == 2)
            leaving = pool.endpoints[1]
            assert {pool.acquire(1), pool.acquire(1)} == set(pool.endpoints)
            name.name(first)
            await second.stop()
            await wait(lambda: len(pool.endpoints) == 1)
            assert lost == [leaving]
            assert pool.inflight == 1


async def test_a_name_that_answers_nobody_leaves_nobody_and_says_so() -> None:
    """The last one leaves too when that has lasted; what is waited for has the name in it."""
    async with ScriptedEngine() as engine:
        name = Name(engine)
        pool = name.pool()
        async with running(pool) as wait:
            name.name()
            await wait(lambda: not pool.endpoints)
            assert (pool.limit, pool.acquire(1)) == (0, None)
            assert pool.explain() == f"no inference endpoint is in service: {SOURCE}: it names no server"
            pool.set_max_inflight(7)
            name.name(engine)
            await wait(lambda: pool.ready)
            assert pool.limit == 7


async def test_an_address_that_no_name_server_could_have_keeps_nobody_else_out() -> None:
    """A file may name anything: what cannot even be looked up is out of service like any server that is away."""
    async with ScriptedEngine() as engine:
        name = Name(engine)
        pool = name.pool()
        async with running(pool) as wait:
            name.urls = [engine.base_url, "http://vllm..rl.svc:8000/v1"]
            await wait(lambda: len(pool.endpoints) == 2 and pool.endpoints[1].checks_failed > 1)
            assert "label empty or too long" in pool.endpoints[1].error
            assert [endpoint.url for endpoint in pool.ready] == [engine.base_url]


async def test_a_name_that_cannot_be_resolved_removes_nobody() -> None:
    """A resolver that fails says nothing about the servers."""
    async with ScriptedEngine() as engine:
        name = Name(engine)
        pool = name.pool()
        async with running(pool) as wait:
            name.error = LookupFailed("no resolver")
            await wait(lambda: pool.membership.sources[0].trouble == "no resolver")
            assert pool.ready


async def test_a_start_waits_for_the_name_and_for_one_server() -> None:
    """Not for one that does not answer, once another is in service; that one joins when it does."""
    gone = ScriptedEngine()
    await gone.start()
    await gone.stop()
    async with ScriptedEngine() as engine:
        name = Name(gone)
        pool = name.pool()
        async with pool, asyncio.TaskGroup() as group:
            waiting = group.create_task(pool.wait_ready(1000))
            await until(lambda: pool.endpoints and pool.endpoints[0].error)
            assert not waiting.done()
            name.name(gone, engine)
            await waiting
            assert [endpoint.url for endpoint in pool.ready] == [engine.base_url]
            async with watched(pool) as wait:
                await gone.start()
                await wait(lambda: len(pool.ready) == 2)
    await gone.stop()


async def test_a_start_follows_the_name() -> None:
    """Servers that were replaced while they were waited for are not waited for any longer."""
    mute = ScriptedEngine(stuck={"/health"})
    async with mute, ScriptedEngine() as engine:
        name = Name(mute)
        async with name.pool() as pool, asyncio.TaskGroup() as group:
            waiting = group.create_task(pool.wait_ready(1000))
            await until(lambda: mute.calls)
            name.name(engine)
            await waiting
            assert [endpoint.url for endpoint in pool.endpoints] == [engine.base_url]
            mute.unstick()


@pytest.mark.parametrize(
    ("error", "said"), [(LookupFailed("no resolver"), "no resolver"), (None, "it names no server")]
)
async def test_a_start_without_anybody_ends_with_what_the_source_says(
    error: LookupFailed | None, said: str
) -> None:
    """As for a server that is not there."""
    name = Name()
    name.error = error
    async with name.pool() as pool:
        with pytest.raises(
            InferenceError, match=f"no inference endpoint was ready within .*{said}"
        ) as raised:
            await pool.wait_ready(0.1)
        assert SOURCE in str(raised.value)


async def test_one_that_does_not_fit_stays_out_and_the_others_work() -> None:
    """It is refused with the reason; where all are such, the start ends at once, as it does with a list."""
    async with ScriptedEngine() as engine, ScriptedEngine(model="another") as other:
        pool = Name(engine, other).pool()
        async with running(pool):
            assert [endpoint.url for endpoint in pool.ready] == [engine.base_url]
            [out] = [endpoint for endpoint in pool.endpoints if not endpoint.healthy]
            assert "another" in out.error
        async with Name(other).pool() as alone:
            with pytest.raises(EngineUnfitError, match="another"):
                await alone.wait_ready(1000)


async def test_one_that_is_listed_stays_whatever_the_name_says() -> None:
    """The name may say it too; it neither joins twice nor leaves."""
    async with ScriptedEngine() as listed, ScriptedEngine() as named:
        name = Name(named, listed)
        pool = name.pool(listed)
        async with running(pool) as wait:
            await wait(lambda: len(pool.ready) == 2)
            assert [endpoint.source for endpoint in pool.endpoints] == ["", SOURCE]
            name.name()
            await wait(lambda: len(pool.endpoints) == 1)
            assert pool.endpoints[0].url == listed.base_url


async def test_a_name_that_changes_all_the_time_under_load_keeps_the_books() -> None:
    """Acquired is released exactly once, whoever comes and goes; in the end nothing is in flight and all work."""
    async with ScriptedEngine() as a, ScriptedEngine() as b, ScriptedEngine() as c:
        name = Name(a, b, c)
        pool = name.pool(limit=30)
        held: list[Endpoint] = []

        def give_back(endpoint: Endpoint) -> None:
            while endpoint in held:
                held.remove(endpoint)
                pool.release(endpoint, 1)

        pool.on_lost = give_back
        choices = [(a, b), (b, c), (c,), (a, c), (a, b, c)]
        with structlog.testing.capture_logs():
            async with running(pool) as wait:
                for turn in range(200):
                    name.name(*choices[turn % len(choices)])
                    if (endpoint := pool.acquire(1)) is not None:
                        held.append(endpoint)
                    if len(held) > 5:
                        pool.release(held.pop(0), 1)
                    assert pool.inflight == len(held)
                    await asyncio.sleep(0.002)
                while held:
                    pool.release(held.pop(), 1)
                assert pool.inflight == 0
                name.name(a, b, c)
                await wait(lambda: len(pool.ready) == 3)
                assert pool.limit == 30
