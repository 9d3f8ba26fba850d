"""Weights that the trainer sends itself: engines stand still meanwhile, and one with half of a version is never sampled from."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orchestrator.inference import (
    Beginning,
    EndpointState,
    EngineUnfitError,
    InferencePool,
    WeightUpdateError,
)
from orchestrator.inference.weights import SENT
from tests.support.inference_engine import ScriptedEngine
from tests.support.inference_pool import Until, build_pool, running, until


@asynccontextmanager
async def two_engines(
    **options: Any,
) -> AsyncIterator[tuple[InferencePool, ScriptedEngine, ScriptedEngine, Until]]:
    async with ScriptedEngine() as one, ScriptedEngine() as other:
        pool = build_pool(one, other, update="trainer", **options)
        async with running(pool) as wait:
            yield pool, one, other, wait


async def send(pool: InferencePool, version: int) -> None:
    """A whole version, as the service does it around the trainer's own work."""
    await pool.sending.begin(version)
    await pool.sending.finish()
    await pool.update_weights(version, SENT)


async def test_engines_stand_still_while_a_version_is_sent_and_go_on_with_its_label() -> None:
    """They stay in service: what is asked of them meanwhile waits, as in any update."""
    async with two_engines() as (pool, one, other, _):
        await pool.sending.begin(1)
        assert pool.sending.engines == [one.base_url, other.base_url]
        assert (one.paused, one.label, other.paused) == (True, "updating 1", True)
        assert [endpoint.version_newest for endpoint in pool.ready] == [1, 1]
        await pool.sending.finish()
        assert (one.paused, one.label, other.label) == (False, "1", "1")
        report = await pool.update_weights(1, SENT)
        assert report.failed == {}
        assert [endpoint.version for endpoint in pool.ready] == [1, 1]
        assert one.aborted == other.aborted == 0


async def test_a_trainer_that_sent_nothing_leaves_them_as_they_were() -> None:
    """With their old label, in service, and no version more."""
    async with two_engines() as (pool, one, other, _):
        await send(pool, 1)
        await pool.sending.begin(2)
        await pool.sending.take_back()
        assert (one.paused, one.label, other.label) == (False, "1", "1")
        assert [(endpoint.version, endpoint.version_newest) for endpoint in pool.ready] == [(1, 1)] * 2
        assert pool.version == 1
        await send(pool, 2)
        assert [endpoint.version for endpoint in pool.ready] == [2, 2]


async def test_after_a_trainer_died_engines_wait_for_the_next_whole_version() -> None:
    """Nobody knows what they have: what they do is aborted, and they say what they wait for."""
    async with two_engines() as (pool, one, other, wait):
        await send(pool, 1)
        await pool.sending.begin(2)
        await pool.sending.give_up("the trainer is gone while version 2 was sent")
        assert not pool.ready
        assert (one.paused, one.aborted, other.aborted) == (False, 1, 1)
        await wait(lambda: pool.sending.waiting == 2)
        assert "waits for the trainer to send version 1" in pool.explain()
        await send(pool, 3)
        await wait(lambda: len(pool.ready) == 2)
        assert [endpoint.version for endpoint in pool.ready] == [3, 3]
        assert pool.sending.waiting == 0


async def test_an_engine_that_restarts_waits_until_the_version_is_sent_again() -> None:
    """The others go on; the same version is enough."""
    async with two_engines() as (pool, one, other, wait):
        await send(pool, 1)
        other.restart()
        await wait(lambda: pool.sending.waiting == 1)
        assert [endpoint.url for endpoint in pool.ready] == [one.base_url]
        await send(pool, 1)
        await wait(lambda: len(pool.ready) == 2)
        assert other.label == "1"


async def test_an_engine_that_restarts_while_a_version_is_sent_does_not_count_as_having_it() -> None:
    """It lacks the mark that it got at the beginning."""
    async with two_engines() as (pool, one, other, wait):
        await pool.sending.begin(1)
        other.restart()
        await pool.sending.finish()
        report = await pool.update_weights(1, SENT)
        assert report.updated == (pool.endpoints[0].name,)
        assert (one.label, other.label) == ("1", "default")
        assert "was restarted while version 1 was sent" in pool.endpoints[1].error
        await wait(lambda: pool.sending.waiting == 1)


async def test_an_engine_that_joins_is_part_of_the_next_update() -> None:
    """It has what it was started with, and gets no work before."""
    async with ScriptedEngine() as one, ScriptedEngine() as late:
        pool = build_pool(one, update="trainer")
        async with running(pool) as wait:
            await send(pool, 1)
            pool.add_endpoint(late.base_url)
            await wait(lambda: pool.sending.waiting == 1)
            await pool.sending.begin(2)
            assert pool.sending.engines == [one.base_url, late.base_url]
            await pool.sending.finish()
            await pool.update_weights(2, SENT)
            await wait(lambda: len(pool.ready) == 2)


async def test_after_a_restart_of_the_service_engines_with_the_label_go_on() -> None:
    """One that stood still, with half of a version, is let go and waits."""
    async with ScriptedEngine(label="7") as one, ScriptedEngine(label="updating 8", paused=True) as half:
        pool = build_pool(one, half, update="trainer", version=7, weights_path=SENT)
        async with running(pool) as wait:
            assert [endpoint.url for endpoint in pool.ready] == [one.base_url]
            assert not half.paused
            assert "waits for the trainer to send version 7" in pool.endpoints[1].error
            await wait(lambda: pool.sending.waiting == 1)


async def test_an_engine_that_cannot_be_paused_is_left_out_and_lost() -> None:
    """Where there is no other nothing can be sent."""
    async with two_engines() as (pool, one, other, _):
        other.broken["/pause"] = 500
        await pool.sending.begin(1)
        assert pool.sending.engines == [one.base_url]
        await pool.sending.finish()
        one.broken["/pause"] = 500
        with pytest.raises(WeightUpdateError, match="no inference server can be sent version 2"):
            await pool.sending.begin(2)
        assert pool.sending.version is None


async def test_a_version_that_no_engine_has_in_the_end_is_refused() -> None:
    """All of them were restarted meanwhile."""
    async with two_engines() as (pool, one, other, _):
        await pool.sending.begin(1)
        one.restart()
        other.restart()
        with pytest.raises(WeightUpdateError, match="no inference server has version 1"):
            await pool.sending.finish()


async def test_a_version_that_is_sent_before_the_last_one_failed_everywhere_holds_up_nothing() -> None:
    """The failure is told, although an engine stands still for the trainer meanwhile."""
    async with two_engines() as (pool, one, other, wait):
        await send(pool, 1)
        other.restart()
        await wait(lambda: pool.sending.waiting == 1)
        await pool.sending.begin(2)
        other.restart()
        await pool.sending.finish()
        one.stuck.add("/weight_info")
        updating = asyncio.create_task(pool.update_weights(2, SENT))
        await wait(pool.endpoints[0].lock.locked)
        beginning = asyncio.create_task(pool.sending.begin(3))
        await wait(lambda: pool.sending.engines == [other.base_url] and other.label == "updating 3")
        await wait(lambda: not pool.endpoints[1].lock.locked())
        one.restart()
        one.unstick()
        assert list((await updating).failed) == [pool.endpoints[0].name]
        await beginning
        assert pool.sending.engines == [other.base_url, one.base_url]


async def test_a_sent_version_is_not_given_up_because_nobody_answers_for_a_moment() -> None:
    """Engines have it all the same, and the trainer will not send it again: they go on by themselves."""
    async with ScriptedEngine() as engine:
        pool = build_pool(engine, update="trainer")
        async with running(pool) as wait:
            await send(pool, 1)
            await pool.sending.begin(2)
            await pool.sending.finish()
            engine.upcoming["/weight_info"] = [503]
            report = await pool.update_weights(2, SENT)
            assert (report.updated, list(report.failed)) == ((), [pool.endpoints[0].name])
            await wait(lambda: len(pool.ready) == 1)
            assert (pool.version, pool.endpoints[0].version, engine.label) == (2, 2, "2")


async def test_an_engine_that_is_removed_does_not_count_as_having_the_version() -> None:
    """Nobody else has it, so it is refused, as where all of them were restarted."""
    async with two_engines() as (pool, one, other, _):
        await pool.sending.begin(1)
        pool.remove_endpoint(other.base_url)
        one.restart()
        with pytest.raises(WeightUpdateError, match=r"has version 1 .*was restarted.*was removed meanwhile"):
            await pool.sending.finish()


@pytest.mark.parametrize("end", ["finish", "take_back", "give_up"])
async def test_an_engine_may_be_removed_at_any_moment_of_a_sending(end: str) -> None:
    """Also between the decision to speak to it and the first word; the others go on."""
    async with two_engines() as (pool, one, other, _):
        beginning = asyncio.create_task(pool.sending.begin(1))
        await asyncio.sleep(0)
        pool.remove_endpoint(other.base_url)
        await beginning
        assert pool.sending.engines == [one.base_url]
        pool.add_endpoint(other.base_url)
        await pool.sending.take_back()
        await pool.sending.begin(1)
        ending = asyncio.create_task(getattr(pool.sending, end)(*(["over"] if end == "give_up" else [])))
        await asyncio.sleep(0)
        pool.remove_endpoint(other.base_url)
        await ending
        assert (pool.sending.version, one.paused) == (None, False)


@pytest.mark.parametrize("beginning", [Beginning.TRAINER, Beginning.OWN])
async def test_a_fresh_run_may_wait_for_version_0(beginning: Beginning) -> None:
    """What the engine has is another run's: the trainer sends the beginning."""
    async with ScriptedEngine(label="12") as engine:
        pool = build_pool(engine, update="trainer", beginning=beginning)
        async with running(pool):
            assert not pool.ready
            assert "waits for the trainer to send version 0" in pool.explain()
            await send(pool, 0)
            await until(lambda: len(pool.ready) == 1)


async def test_where_nothing_is_trained_an_engine_may_have_whatever_it_has() -> None:
    """An evaluation by itself asks nobody to send anything."""
    async with ScriptedEngine(label="12") as engine:
        pool = build_pool(engine, update="trainer", beginning=Beginning.ANY)
        async with running(pool):
            assert len(pool.ready) == 1


async def test_a_version_that_is_published_is_refused() -> None:
    """There is nothing to load it from."""
    async with two_engines() as (pool, *_):
        for path in (None, "/ckpt/step_1"):
            with pytest.raises(WeightUpdateError, match=r"with trainer\.updating\(1\)"):
                await pool.check_version(1, path)


async def test_an_engine_that_does_not_say_what_it_has_is_unfit() -> None:
    """Nobody could tell who has the version."""
    async with ScriptedEngine(broken={"/weight_info": 404}) as engine:
        async with build_pool(engine, update="trainer") as pool:
            with pytest.raises(EngineUnfitError, match="does not say which weights it has"):
                await pool.wait_ready(10)
        assert pool.endpoints[0].state is EndpointState.STARTING
