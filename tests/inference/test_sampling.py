"""Whether engines' log-probabilities can be trained on: asked, tried out, and what becomes of an engine that does not fit."""

from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ConfigError
from orchestrator.inference import NEUTRAL, EndpointState, EngineRefusedError, SamplingCheck
from orchestrator.inference.sampling import shaping
from tests.support.inference_engine import ScriptedEngine
from tests.support.inference_pool import build_pool, until, watched

COLD = {**NEUTRAL, "temperature": 0.7}
CUT = {**NEUTRAL, "top_p": 0.9}
REMEDY = "--logprobs-mode processed_logprobs"


def check_of(*samplings: dict[str, Any], accept_raw: bool = False) -> SamplingCheck:
    named = {f"env{number}": sampling for number, sampling in enumerate(samplings or (dict(NEUTRAL),))}
    return SamplingCheck(model="tiny", samplings=named, accept_raw=accept_raw, timeout_s=10.0)


def tokens_asked(engine: ScriptedEngine) -> int:
    return engine.calls.count("POST /v1/chat/completions")


@pytest.mark.parametrize(
    ("sampling", "found"),
    [
        ({}, {}),
        (dict(NEUTRAL), {}),
        ({"temperature": 1, "top_k": 0, "max_tokens": 9, "seed": 3, "stop": ["a"], "logit_bias": {}}, {}),
        ({"top_p": None}, {}),
        ({"temperature": 0.7, "max_tokens": 9}, {"temperature": 0.7}),
        ({"top_k": 1, "min_p": 0.1}, {"top_k": 1, "min_p": 0.1}),
        (
            {"presence_penalty": 0.5, "logit_bias": {"7": -100}},
            {"presence_penalty": 0.5, "logit_bias": {"7": -100}},
        ),
    ],
)
def test_what_shapes_the_distribution_is_told_from_what_does_not(
    sampling: dict[str, Any], found: dict[str, Any]
) -> None:
    """Lengths, seeds and stop strings leave probabilities alone, and so do neutral values."""
    assert shaping(sampling) == found


@given(
    st.dictionaries(
        st.sampled_from([*NEUTRAL, "seed"]), st.floats(allow_nan=False) | st.integers() | st.text()
    )
)
def test_no_value_makes_the_question_fail(sampling: dict[str, Any]) -> None:
    """Whatever a configuration holds, only names of the sampling come out."""
    assert shaping(sampling).keys() <= sampling.keys()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
async def test_neutral_sampling_fits_every_engine_that_tells(mode: str) -> None:
    """At temperature 1 and without cuts both modes are the same, and no token is spent."""
    async with ScriptedEngine(logprobs_mode=mode) as engine, build_pool(engine, sampling=check_of()) as pool:
        await pool.wait_ready(10)
        assert tokens_asked(engine) == 0


@pytest.mark.parametrize("sampling", [COLD, CUT])
async def test_an_engine_that_says_raw_ends_the_start_with_the_remedy(sampling: dict[str, Any]) -> None:
    """The message names the env, what it is sampled with and what to do; the exit code is that of a configuration."""
    async with ScriptedEngine(logprobs_mode="raw_logprobs", logprobs="raw") as engine:
        async with build_pool(engine, sampling=check_of(dict(NEUTRAL), sampling)) as pool:
            with pytest.raises(EngineRefusedError) as caught:
                await pool.wait_ready(1000)
        assert tokens_asked(engine) == 0
    message = str(caught.value)
    assert caught.value.exit_code == ConfigError.exit_code
    assert engine.base_url in message
    assert 'env "env1" is trained with t' in message
    assert REMEDY in message
    assert "inference.accept_raw_logprobs = true" in message


async def test_an_engine_that_says_processed_is_taken_at_its_word() -> None:
    """No token is spent on one that tells."""
    async with (
        ScriptedEngine(logprobs_mode="processed_logprobs") as engine,
        build_pool(engine, sampling=check_of(COLD, CUT)) as pool,
    ):
        await pool.wait_ready(10)
        assert tokens_asked(engine) == 0


async def test_logits_are_no_log_probabilities() -> None:
    """vLLM can return logits in their place, which nothing can be trained on, however it is sampled."""
    async with (
        ScriptedEngine(logprobs_mode="processed_logits") as engine,
        build_pool(engine, sampling=check_of(accept_raw=True)) as pool,
    ):
        with pytest.raises(EngineRefusedError, match=f'returns "processed_logits".*{REMEDY}'):
            await pool.wait_ready(1000)


@pytest.mark.parametrize(
    ("returned", "sampling", "complaint"),
    [
        ("raw", COLD, "before temperature and cuts"),
        ("raw", CUT, "before temperature and cuts"),
        ("temperature", COLD, ""),
        ("temperature", CUT, "before top_p, top_k and min_p"),
        ("processed", COLD, ""),
        ("processed", CUT, ""),
        ("raw", dict(NEUTRAL), ""),
    ],
)
async def test_an_engine_that_does_not_say_is_tried_out(
    returned: str, sampling: dict[str, Any], complaint: str
) -> None:
    """The same prompt at two temperatures, and with one token left by a cut, shows what is returned."""
    async with (
        ScriptedEngine(logprobs=returned) as engine,
        build_pool(engine, sampling=check_of(sampling)) as pool,
    ):
        if not complaint:
            await pool.wait_ready(10)
            assert pool.ready
            return
        with pytest.raises(EngineRefusedError, match=complaint):
            await pool.wait_ready(1000)


async def test_an_engine_that_cannot_be_tried_out_is_refused() -> None:
    """Without top_logprobs nothing can be compared; what nobody knows is not taken for right."""
    async with (
        ScriptedEngine(top_logprobs=False) as engine,
        build_pool(engine, sampling=check_of(COLD)) as pool,
    ):
        with pytest.raises(EngineRefusedError, match="does not say which log-probabilities"):
            await pool.wait_ready(1000)


@pytest.mark.parametrize("mode", [None, "raw_logprobs"])
async def test_raw_ones_can_be_accepted(mode: str | None) -> None:
    """By the setting that says so, and then nothing is tried out."""
    async with (
        ScriptedEngine(logprobs_mode=mode, logprobs="raw") as engine,
        build_pool(engine, sampling=check_of(COLD, accept_raw=True)) as pool,
    ):
        await pool.wait_ready(10)
        assert pool.ready


async def test_an_engine_that_does_not_fit_is_not_mixed_in_with_those_that_do() -> None:
    """The others get all the work; the reason stands in the status, and it enters when it was started as it should be."""
    raw = ScriptedEngine(logprobs_mode="raw_logprobs", logprobs="raw")
    async with (
        ScriptedEngine(logprobs_mode="processed_logprobs") as good,
        raw,
        build_pool(good, raw, sampling=check_of(COLD)) as pool,
        watched(pool),
    ):
        await pool.wait_ready(1000)
        fit, unfit = pool.endpoints
        assert [pool.acquire(1), pool.acquire(1)] == [fit, fit]
        assert unfit.state is EndpointState.STARTING
        assert REMEDY in unfit.error
        raw.logprobs_mode = "processed_logprobs"
        await until(lambda: unfit.healthy)


async def test_an_engine_that_comes_back_otherwise_stays_out() -> None:
    """One that was restarted without its option is asked again before it gets work."""
    async with (
        ScriptedEngine(logprobs_mode="processed_logprobs") as engine,
        build_pool(engine, sampling=check_of(COLD)) as pool,
    ):
        await pool.wait_ready(10)
        [endpoint] = pool.endpoints
        engine.logprobs_mode = "raw_logprobs"
        pool.lose(endpoint, "gone")
        async with watched(pool):
            await until(lambda: REMEDY in endpoint.error)
            assert not pool.ready
            assert REMEDY in pool.explain()


@pytest.mark.parametrize("unknown", ["min_p", "top_k"])
async def test_a_server_that_refuses_the_neutral_fields_is_named_with_the_remedy(unknown: str) -> None:
    """Every rollout would fail; the start does instead, and says how to leave the fields out."""
    async with ScriptedEngine(unknown_fields=frozenset({unknown})) as engine:
        async with build_pool(engine, sampling=check_of()) as pool:
            with pytest.raises(
                EngineRefusedError, match=f"refuses {unknown}, .*train.neutral_sampling = false"
            ):
                await pool.wait_ready(1000)
        async with build_pool(engine, sampling=check_of({"max_tokens": 5})) as pool:
            await pool.wait_ready(10)


@pytest.mark.parametrize(
    ("generation_config", "warned"), [("auto", True), ("/models/tiny", True), ("vllm", False)]
)
async def test_defaults_of_the_models_folder_are_told_where_they_apply(
    generation_config: str, warned: bool
) -> None:
    """Only parameters that are not sent are filled in by the engine."""
    async with ScriptedEngine(logprobs_mode="raw_logprobs", generation_config=generation_config) as engine:
        with structlog.testing.capture_logs() as logs:
            for sampling in (dict(NEUTRAL), {"temperature": 1.0}):
                async with build_pool(engine, sampling=check_of(sampling)) as pool:
                    await pool.wait_ready(10)
    found = [entry["parameters"] for entry in logs if entry["event"] == "endpoint.own_defaults"]
    assert found == ([["top_p", "top_k", "min_p", "repetition_penalty"]] if warned else [])


async def test_a_server_that_hangs_when_it_is_tried_is_waited_for() -> None:
    """No answer is not a bad answer."""
    async with (
        ScriptedEngine(broken={"/v1/chat/completions": 503}) as engine,
        build_pool(engine, sampling=check_of(COLD)) as pool,
        watched(pool),
    ):
        await until(lambda: "log-probabilities answered 503" in pool.endpoints[0].error)
        assert not pool.ready
        engine.broken.clear()
        await until(lambda: pool.ready)
