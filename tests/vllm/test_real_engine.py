"""The pool and the environments' model against a real vLLM: tokens, weights, crashes, hangs.

One engine is shared by the module and left with some weights or other by each test; every test publishes what
it needs.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import aiohttp
import numpy as np
import pytest

from envs.errors import RolloutFailure
from envs.inference_client import InferenceClient
from envs.model import Model, ModelSettings
from envs.rollout import Sequence
from orchestrator.inference import (
    Endpoint,
    EndpointState,
    FixedConcurrency,
    HealthPolicy,
    InferencePool,
    WeightUpdateError,
)
from tests.vllm import load as vllm_load
from tests.vllm.engine import MODEL, START_TIMEOUT_S, WEIGHTS, VllmEngine, score
from tests.vllm.load import Booked, loaded

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 2e-3  # batches of other shapes round differently; other weights differ by whole units
HEALTH = HealthPolicy(interval_s=0.5, check_timeout_s=20.0, progress_timeout_s=5.0, probe_timeout_s=5.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    engine = VllmEngine(log=tmp_path_factory.mktemp("vllm") / "engine.log")
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def build_pool(engine: VllmEngine, limit: int = 16) -> InferencePool:
    return vllm_load.build_pool(engine, FixedConcurrency(limit), HEALTH)


def weights_of(version: int) -> str:
    """Odd versions have the weights b, even ones the initial weights a."""
    return WEIGHTS["b" if version % 2 else "a"]


async def test_rollouts_carry_the_engines_tokens_and_log_probabilities(
    engine: VllmEngine, http: aiohttp.ClientSession
) -> None:
    """Scoring the tokens of several turns afresh gives the log-probabilities that the rollouts recorded."""
    settings = ModelSettings(
        model=MODEL, sampling={"temperature": 1.0, "max_tokens": 24}, system_prompt="think step by step"
    )

    async def attempt(client: InferenceClient, number: int) -> list[Sequence]:
        model = Model(
            settings, client=client, base_url=engine.base_url, session=f"group-{number}", cache_salt="v0"
        )
        messages: list[dict[str, object]] = [{"role": "user", "content": f"question {number}"}]
        for _ in range(3):
            reply = await model.chat(messages)
            messages += [reply.message, {"role": "user", "content": "and then?"}]
        rollout = model.rollout(reward=1.0)
        rollout.check()
        return rollout.sequences

    async with build_pool(engine) as pool, InferenceClient(limit=16) as client, asyncio.TaskGroup() as group:
        await pool.wait_ready(START_TIMEOUT_S)
        attempts = [group.create_task(attempt(client, number)) for number in range(16)]
    sampled = 0
    for sequence in [sequence for attempted in attempts for sequence in attempted.result()]:
        fresh = await score(http, engine, sequence.tokens.tolist(), "fresh")
        trained = sequence.mask == 1
        sampled += int(trained.sum())
        np.testing.assert_allclose(sequence.logprobs[trained], fresh[trained], atol=TOLERANCE)
        assert not sequence.logprobs[~trained].any()
    assert sampled > 16 * 3


async def test_under_load_every_token_matches_the_version_that_it_is_booked_under(
    engine: VllmEngine, http: aiohttp.ClientSession
) -> None:
    """Six updates under load: no request fails, and each token was sampled by a version of its rollout's span.

    Within a span tokens may come from the old weights first and the new ones after, never the other way.
    """
    async with loaded(build_pool(engine), limit=16) as load:
        pool = load.pool
        for version in range(1, 7):
            enough = len(load.finished) + 24
            await load.until(lambda enough=enough: len(load.finished) >= enough)  # type: ignore[misc]  # bound now
            report = await pool.update_weights(version, weights_of(version))
            assert report.failed == {}
        enough = len(load.finished) + 24
        await load.until(lambda: len(load.finished) >= enough)
        load.stop()
        await load.until(lambda: pool.inflight == 0)
        assert load.failures == []
        scores = {}
        for name in ("a", "b"):
            await pool.update_weights(pool.version + 1, WEIGHTS[name])
            scores[name] = [await _scores(http, engine, booked, name) for booked in load.finished]

    spanning = 0
    for booked, under_a, under_b in zip(load.finished, scores["a"], scores["b"], strict=True):
        [sequence] = booked.rollout.sequences
        trained = sequence.mask == 1
        found = sequence.logprobs[trained]
        old, new = (under_b, under_a) if booked.version % 2 else (under_a, under_b)
        old, new = old[trained], new[trained]
        assert np.abs(old - new).mean() > 0.2, "the two weights must be told apart by their log-probabilities"
        if booked.version_end == booked.version:
            np.testing.assert_allclose(found, old, atol=TOLERANCE)
            continue
        assert booked.version_end == booked.version + 1
        spanning += 1
        is_old, is_new = np.abs(found - old) < TOLERANCE, np.abs(found - new) < TOLERANCE
        switches = [at for at in range(len(found) + 1) if is_old[:at].all() and is_new[at:].all()]
        assert switches, (
            f"booked under {booked.version} to {booked.version_end}, but sampled by neither in order"
        )
    versions = {booked.version for booked in load.finished}
    assert versions == set(range(7))
    assert spanning > 0, "an update under load meets requests in flight"


async def _scores(http: aiohttp.ClientSession, engine: VllmEngine, booked: Booked, salt: str) -> np.ndarray:
    [sequence] = booked.rollout.sequences
    return await score(http, engine, sequence.tokens.tolist(), f"score-{salt}")


async def test_a_missing_folder_does_not_reach_the_engine(engine: VllmEngine) -> None:
    """The load that would end the engine is refused here, and rollouts go on."""
    async with loaded(build_pool(engine, 4), limit=4) as load:
        await load.pool.update_weights(1, WEIGHTS["a"])
        with pytest.raises(WeightUpdateError, match="is not a folder"):
            await load.pool.update_weights(2, WEIGHTS["a"] + "_missing")
        enough = len(load.finished) + 8
        await load.until(lambda: len(load.finished) >= enough)
        assert load.failures == []


async def test_a_hung_engine_is_taken_out_and_returns_when_it_moves_again(engine: VllmEngine) -> None:
    """Health checks stay well while the computing process stands still; the missing progress shows it."""
    async with loaded(build_pool(engine, 4), limit=4, max_tokens=400) as load:
        [endpoint] = load.pool.endpoints
        await load.until(lambda: len(load.finished) >= 2)
        engine.signal_core(signal.SIGSTOP)
        try:
            await load.until(lambda: endpoint.state is EndpointState.LOST)
            assert "finishes nothing" in endpoint.error
        finally:
            engine.signal_core(signal.SIGCONT)
        await load.until(lambda: endpoint.healthy)
        enough = len(load.finished) + 8
        await load.until(lambda: len(load.finished) >= enough)


async def test_a_killed_engine_returns_with_the_published_weights(
    engine: VllmEngine, http: aiohttp.ClientSession
) -> None:
    """The engine starts again with its initial weights and gets no work until it has the published ones."""
    probe = list(range(10, 40))
    lost: list[Endpoint] = []
    async with loaded(build_pool(engine, 8), limit=8) as load:
        pool = load.pool
        pool.on_lost = lost.append
        [endpoint] = pool.endpoints
        expected = {}
        for version, name in ((1, "a"), (2, "b")):
            await pool.update_weights(version, WEIGHTS[name])
            expected[name] = await score(http, engine, probe, f"before-{name}")
        assert np.abs(expected["a"] - expected["b"]).mean() > 0.2
        await load.until(lambda: len(load.finished) >= 16)
        engine.kill()
        await load.until(lambda: not pool.ready)
        await load.until(lambda: pool.inflight == 0)
        assert lost == [endpoint]
        assert {failure.kind for failure in load.failures} == {"connection"}
        assert all(isinstance(failure, RolloutFailure) and failure.retryable for failure in load.failures)
        finished = len(load.finished)
        engine.start()
        await load.until(lambda: bool(pool.ready), seconds=START_TIMEOUT_S)
        np.testing.assert_allclose(await score(http, engine, probe, "after"), expected["b"], atol=TOLERANCE)
        await load.until(lambda: len(load.finished) >= finished + 16)
        assert {booked.version for booked in load.finished[finished:]} == {2}
        for booked in load.finished[finished : finished + 16]:
            [sequence] = booked.rollout.sequences
            trained = sequence.mask == 1
            fresh = await score(http, engine, sequence.tokens.tolist(), "after-rollouts")
            np.testing.assert_allclose(sequence.logprobs[trained], fresh[trained], atol=TOLERANCE)
