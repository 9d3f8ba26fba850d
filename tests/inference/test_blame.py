"""Who is to blame for a failed rollout, and what clears an endpoint that is suspected."""

import json

import pytest

from envs.errors import FailureKind
from orchestrator.inference import EndpointState, InferencePool
from orchestrator.inference.blame import Blame, blame
from tests.support.inference_engine import ScriptedEngine
from tests.support.inference_pool import QUICK, build_pool, rounds, running, until

CHAT = "/v1/chat/completions"
THE_ENDPOINTS = {
    "connection",
    "overloaded",
    "server_error",
    "bad_response",
    "no_token_ids",
    "unknown_model",
    "unauthorized",
    "timed_out",
}
HTML = "<html><body><h1>Welcome to nginx!</h1></body></html>"


async def fail(pool: InferencePool, kind: str, times: int = QUICK.suspect_after) -> None:
    """Rollouts in a row that fail on the first endpoint, once its entry is not fresh any more."""
    [endpoint] = pool.endpoints
    await until(lambda: pool.clock() >= endpoint.trusted_until)
    for _ in range(times):
        pool.note_failure(endpoint, kind)


@pytest.mark.parametrize("kind", [*FailureKind, "timed_out", "error", "invalid_rollout", "KeyError", ""])
def test_only_failures_that_an_endpoint_causes_speak_against_it(kind: str) -> None:
    """Requests that no server could answer, aborts for new weights and an environment's own failures do not."""
    assert (blame(kind) is not Blame.NOT_THE_ENDPOINT) == (kind in THE_ENDPOINTS)


@pytest.mark.parametrize("kind", ["error", "context_length", "sandbox_died"])
async def test_the_exceptions_of_an_environment_cost_no_endpoint_its_work(kind: str) -> None:
    """However many there are; and they do not make up for failures that do count."""
    async with ScriptedEngine() as engine:
        pool = build_pool(engine)
        async with running(pool):
            [endpoint] = pool.endpoints
            await fail(pool, kind, times=100)
            await fail(pool, "timed_out", times=QUICK.suspect_after - 1)
            await fail(pool, kind, times=100)
            assert (endpoint.healthy, endpoint.error) == (True, "")
            pool.note_failure(endpoint, "timed_out")
            assert endpoint.state is EndpointState.SUSPECT
            assert "8 rollouts in a row failed, the last one with timed_out" in endpoint.error


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, HTML),
        (200, "{}"),
        (200, '{"choices": []}'),
        (200, ""),
        (302, HTML),
        (400, HTML),
        (401, '{"error": {"message": "no key"}}'),
        (403, '{"error": {"message": "not you"}}'),
        (404, '{"detail": "Not Found"}'),
        (502, HTML),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_server_that_answers_something_else_than_completions_stays_out_until_it_does(
    status: int, text: str
) -> None:
    """A proxy's page is no sign of life: the endpoint is lost, with what it said, is tried again and comes back."""
    async with ScriptedEngine() as engine:
        pool = build_pool(engine)
        async with running(pool):
            [endpoint] = pool.endpoints
            engine.answers[CHAT] = (status, text)
            await fail(pool, "bad_response")
            await until(lambda: endpoint.state is EndpointState.LOST)
            await until(lambda: endpoint.retries >= 2)  # with longer and longer pauses
            assert pool.acquire(1) is None
            assert "POST /chat/completions (probe)" in endpoint.error
            assert text[:50].replace("\n", " ") in endpoint.error
            assert endpoint.error in pool.explain()
            engine.answers.clear()
            await until(lambda: endpoint.healthy)
            assert (endpoint.error, pool.explain(), endpoint.out_since) == ("", "", None)


async def test_the_reason_of_the_loss_quotes_what_the_server_said() -> None:
    """The message blames the endpoint, not the rollouts."""
    async with ScriptedEngine(answers={CHAT: (200, HTML)}) as engine:
        pool = build_pool(engine)
        reasons: list[str] = []
        pool.on_lost = lambda endpoint: reasons.append(endpoint.error)
        async with running(pool):
            await fail(pool, "bad_response")
            await until(lambda: reasons)
        assert "says that it is well but does not answer requests as it should" in reasons[0]
        assert "Welcome to nginx!" in reasons[0]


@pytest.mark.parametrize(
    ("status", "key"), [(400, "error"), (413, "message"), (422, "detail"), (429, "error")]
)
async def test_a_server_that_refuses_the_probe_for_what_it_asks_is_alive(status: int, key: str) -> None:
    """A refusal in the API's own words comes from a server that works."""
    refusal = json.dumps({key: "this model's maximum context length is 0 tokens"})
    async with ScriptedEngine(answers={CHAT: (status, refusal)}) as engine:
        pool = build_pool(engine)
        async with running(pool):
            [endpoint] = pool.endpoints
            await fail(pool, "bad_response")
            await until(lambda: endpoint.healthy)
            assert endpoint.losses == 0
            assert f"POST {CHAT}" in engine.calls


async def test_counters_that_move_do_not_clear_a_server_that_answers_nonsense() -> None:
    """The engine may work for others while what we get from it is a page of something in between."""
    page = "vllm:num_requests_running 1\nvllm:generation_tokens_total {tokens}\n"
    async with ScriptedEngine(metrics=page.format(tokens=1), answers={CHAT: (200, HTML)}) as engine:
        pool = build_pool(engine)
        async with running(pool):
            [endpoint] = pool.endpoints
            await rounds(engine)
            engine.stuck.add("/health")
            await engine.wait_for(lambda: engine.calls[-1] == "GET /health")
            await fail(pool, "bad_response")
            engine.metrics = page.format(tokens=2)
            engine.unstick()
            await until(lambda: endpoint.state is EndpointState.LOST)


async def test_a_server_without_token_ids_stays_out_until_it_returns_them() -> None:
    """A completion alone does not clear an endpoint whose completions cannot be trained on."""
    async with ScriptedEngine(token_ids=False) as engine:
        pool = build_pool(engine)
        async with running(pool):
            [endpoint] = pool.endpoints
            await fail(pool, "no_token_ids")
            await until(lambda: endpoint.retries >= 2)
            assert "returned no ids" in endpoint.error
            engine.token_ids = True
            await until(lambda: endpoint.healthy)
