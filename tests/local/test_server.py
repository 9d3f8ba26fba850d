"""The local inference server: the chat API, the administrative calls, and its life as a child process."""

import asyncio
import json
import math
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.inference import NEUTRAL
from orchestrator.inference.metrics import parse_metrics
from orchestrator.local.policy import Policy
from orchestrator.local.server import PolicyServerSpec, reserve_port, run_policy_server, serve
from orchestrator.local.tokenizer import END, apply_chat_template, decode, encode
from tests.support import late_client

QUESTION = {"model": "local", "messages": [{"role": "user", "content": "reverse abc"}], "max_tokens": 4}
FOR_TRAINING = {**QUESTION, "logprobs": True, "return_token_ids": True}


class Client:
    """A server's client; `ask` and `call` return status and decoded body."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession) -> None:
        self.base_url = base_url
        self.root = base_url.removesuffix("/v1")
        self.session = session

    async def ask(self, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.session.post(f"{self.base_url}/chat/completions", json=body) as response:
            return response.status, await response.json()

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.request(method, self.root + path, json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def reload(self, path: Path | str) -> int:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        return (await self.call("POST", "/collective_rpc", body))[0]

    async def wait_for_load(self, *, running: int, waiting: int) -> None:
        """Returns once the server reports this many requests."""
        while True:
            metrics = parse_metrics((await self.call("GET", "/metrics"))[1])
            assert metrics is not None
            if (metrics.running, metrics.waiting) == (running, waiting):
                return
            await asyncio.sleep(0.005)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serve(PolicyServerSpec(max_model_len=2048)) as base_url, aiohttp.ClientSession() as session:
        yield Client(base_url, session)


@pytest.fixture
async def slow_client() -> AsyncIterator[Client]:
    """A server that would take an hour for every request."""
    async with run_policy_server(latency_s=3600) as base_url, aiohttp.ClientSession() as session:
        yield Client(base_url, session)


def policy_that_says(letter: str) -> Policy:
    """A policy that answers everything with one letter."""
    policy = Policy()
    policy.table[:, encode(letter)[0]] = 5.0
    return policy


async def test_an_answer_carries_token_ids_and_log_probabilities(client: Client) -> None:
    """What training needs stands where vLLM puts it, one log-probability per sampled token."""
    status, answer = await client.ask(FOR_TRAINING)
    choice = answer["choices"][0]
    assert status == 200
    assert answer["prompt_token_ids"] == apply_chat_template(QUESTION["messages"])  # type: ignore[arg-type]
    assert choice["message"] == {"role": "assistant", "content": decode(choice["token_ids"])}
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert len(logprobs) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert all(math.isfinite(logprob) and logprob < 0 for logprob in logprobs)
    ended = choice["token_ids"][-1] == END
    assert choice["finish_reason"] == ("stop" if ended else "length")


async def test_token_ids_are_sent_only_when_asked_for(client: Client) -> None:
    """An evaluation's answer holds text alone."""
    _, answer = await client.ask(QUESTION)
    assert "prompt_token_ids" not in answer
    assert not {"token_ids", "logprobs"} & set(answer["choices"][0])


async def test_a_seed_makes_an_answer_repeatable_whatever_else_is_asked(client: Client) -> None:
    """Requests with the same seed get the same tokens, also among others in the same batch."""
    seeded = {**FOR_TRAINING, "seed": 7, "max_tokens": 8}
    _, alone = await client.ask(seeded)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(client.ask(FOR_TRAINING))
        among_others = tasks.create_task(client.ask(seeded))
    _, again = among_others.result()
    assert again["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


async def test_temperature_zero_takes_the_likeliest_token(client: Client, tmp_path: Path) -> None:
    """Greedy decoding follows the weights, not the dice."""
    assert await client.reload(policy_that_says("q").save(tmp_path)) == 200
    _, answer = await client.ask({**QUESTION, "temperature": 0})
    assert answer["choices"][0]["message"]["content"] == "qqqq"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_ends_the_answer_and_is_cut_off(client: Client, tmp_path: Path) -> None:
    """The text ends before the stop string; the token ids keep what was sampled."""
    await client.reload(policy_that_says("q").save(tmp_path))
    _, answer = await client.ask({**FOR_TRAINING, "temperature": 0, "stop": ["zz", "qq"]})
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert choice["token_ids"] == encode("qq")


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
async def test_sampling_follows_the_probabilities(client: Client, temperature: float) -> None:
    """The share of answers that begin with the end mark is the probability that the server itself reports."""
    request = {**FOR_TRAINING, **NEUTRAL, "max_tokens": 1, "temperature": temperature}
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(client.ask(request)) for _ in range(600)]
    choices = [task.result()[1]["choices"][0] for task in asked]
    ends = [choice for choice in choices if choice["token_ids"] == [END]]
    probability = math.exp(ends[0]["logprobs"]["content"][0]["logprob"])
    spread = math.sqrt(probability * (1 - probability) / len(choices))
    assert abs(len(ends) / len(choices) - probability) < 5 * spread


@pytest.mark.parametrize(
    ("change", "status", "kind", "complaint"),
    [
        ({"model": "gpt"}, 404, "NotFoundError", "gpt"),
        (
            {"messages": [{"role": "user", "content": "a" * 2048}]},
            400,
            "BadRequestError",
            "maximum context length",
        ),
        ({"messages": []}, 400, "BadRequestError", "empty"),
        ({"messages": "hello"}, 400, "BadRequestError", "messages"),
        ({"n": 2}, 400, "BadRequestError", "one answer"),
        ({"stream": True}, 400, "BadRequestError", "stream"),
        ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ({"temperature": -1}, 400, "BadRequestError", "temperature"),
        ({"top_p": 0.9}, 400, "BadRequestError", "top_p"),
        ({"min_p": 0.1}, 400, "BadRequestError", "min_p"),
        ({"repetition_penalty": 1.1}, 400, "BadRequestError", "repetition_penalty"),
    ],
)
async def test_a_bad_request_is_refused_in_openai_form(
    client: Client, change: dict[str, Any], status: int, kind: str, complaint: str
) -> None:
    """The error has a message, a type and a code, and the server goes on."""
    seen, answer = await client.ask({**QUESTION, **change})
    assert seen == answer["error"]["code"] == status
    assert answer["error"]["type"] == kind
    assert complaint in answer["error"]["message"]
    assert (await client.ask(QUESTION))[0] == 200


async def test_more_tokens_than_fit_are_capped(client: Client) -> None:
    """A prompt that fits is answered, however many tokens were asked for."""
    status, answer = await client.ask(
        {**QUESTION, "messages": [{"role": "user", "content": "a" * 2044}], "max_tokens": 99}
    )
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 1


async def test_health_and_models_answer(client: Client) -> None:
    """A server that runs is healthy and names its model; an unknown path is a 404 in OpenAI's form."""
    assert (await client.call("GET", "/health"))[0] == 200
    _, models = await client.call("GET", "/v1/models")
    assert [model["id"] for model in models["data"]] == ["local"]
    status, answer = await client.call("GET", "/v1/nothing")
    assert status == answer["error"]["code"] == 404


async def test_new_weights_change_the_answers(client: Client, tmp_path: Path) -> None:
    """After a reload, log-probabilities are those of the new weights."""
    greedy = {**FOR_TRAINING, "temperature": 0, "max_tokens": 1}
    await client.reload(policy_that_says("q").save(tmp_path / "a"))
    _, before = await client.ask(greedy)
    assert await client.reload(policy_that_says("z").save(tmp_path / "b")) == 200
    _, after = await client.ask(greedy)
    assert [decode(answer["choices"][0]["token_ids"]) for answer in (before, after)] == ["q", "z"]


async def test_weights_that_cannot_be_loaded_leave_the_old_ones_in_place(
    client: Client, tmp_path: Path
) -> None:
    """A missing or damaged folder is a client's error, and the server goes on with what it had."""
    await client.reload(policy_that_says("q").save(tmp_path / "good"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "policy.npz").write_bytes(b"PK\x03\x04")
    for path in ("missing", "bad"):
        assert await client.reload(tmp_path / path) == 400
    assert (await client.call("POST", "/collective_rpc", {"method": "explode"}))[0] == 400
    _, answer = await client.ask({**QUESTION, "temperature": 0})
    assert answer["choices"][0]["message"]["content"] == "qqqq"


async def test_the_label_of_the_weights_can_be_read_back(client: Client) -> None:
    """A label is kept as given; a request without one changes nothing."""
    assert (await client.call("GET", "/weight_info"))[1] == {"weight_version": "default"}
    await client.call("POST", "/update_weight_version", {"new_version": "12"})
    assert (await client.call("POST", "/update_weight_version", {"version": 13}))[0] == 400
    assert (await client.call("GET", "/weight_info"))[1] == {"weight_version": "12"}


async def test_requests_wait_while_the_server_is_paused(client: Client) -> None:
    """A request that arrives during a pause is answered after it; health and metrics answer all along."""
    await client.call("POST", "/pause?mode=wait")
    assert (await client.call("GET", "/is_paused"))[1] == {"is_paused": True}
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(client.ask(QUESTION))
        await client.wait_for_load(running=0, waiting=1)
        assert (await client.call("GET", "/health"))[0] == 200
        await client.call("POST", "/resume")
    assert asked.result()[0] == 200
    assert (await client.call("GET", "/is_paused"))[1] == {"is_paused": False}


@pytest.mark.parametrize("path", ["/pause?mode=abort", "/pause", "/abort_requests"])
async def test_aborted_requests_end_at_once_and_say_so(slow_client: Client, path: str) -> None:
    """What is in flight is answered with finish_reason "abort"."""
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(slow_client.ask(QUESTION))
        await slow_client.wait_for_load(running=1, waiting=0)
        assert (await slow_client.call("POST", path))[0] == 200
    status, answer = asked.result()
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")


async def test_an_unknown_way_to_pause_is_refused(client: Client) -> None:
    """The error names the ways there are."""
    status, answer = await client.call("POST", "/pause?mode=nap")
    assert status == 400
    assert "abort, wait, keep" in answer["error"]["message"]


async def test_a_client_that_leaves_is_forgotten(slow_client: Client) -> None:
    """The request of a broken connection leaves the server."""
    asked = asyncio.create_task(slow_client.ask(QUESTION))
    await slow_client.wait_for_load(running=1, waiting=0)
    asked.cancel()
    await slow_client.wait_for_load(running=0, waiting=0)


async def test_closing_the_server_ends_what_is_in_flight() -> None:
    """A client that still waits when the server closes gets an answer or a broken connection, never silence."""
    async with aiohttp.ClientSession() as session:
        async with run_policy_server(latency_s=3600) as base_url:
            client = Client(base_url, session)
            asked = asyncio.create_task(client.ask(QUESTION))
            await client.wait_for_load(running=1, waiting=0)
        done = (await asyncio.wait([asked]))[0].pop()
        if done.exception() is None:
            assert done.result()[1]["choices"][0]["finish_reason"] == "abort"
        else:
            assert isinstance(done.exception(), aiohttp.ClientError)


@pytest.mark.parametrize("turns", late_client.TURNS)
async def test_a_client_that_comes_while_it_closes_is_let_go(turns: int) -> None:
    """Whenever it comes: no connection is left over that nobody serves."""
    assert await late_client.is_let_go(run_policy_server(), turns)


async def test_a_server_can_start_from_saved_weights_on_a_reserved_port(tmp_path: Path) -> None:
    """The parent knows the port beforehand, and the first answer comes from the given weights."""
    folder = policy_that_says("q").save(tmp_path)
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        spec = PolicyServerSpec(port=port, reuse_port=True, weights=str(folder))
        async with serve(spec) as base_url, aiohttp.ClientSession() as session:
            assert base_url == f"http://127.0.0.1:{port}/v1"
            _, answer = await Client(base_url, session).ask({**QUESTION, "temperature": 0})
    assert answer["choices"][0]["message"]["content"] == "qqqq"


@contextmanager
def child(spec: dict[str, Any]) -> Iterator["subprocess.Popen[str]"]:
    """The server as a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.local.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(spec) + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_child_reports_its_address_and_ends_with_its_parent() -> None:
    """One line says where it is; the end of standard input ends it with code 0."""
    with child({"port": 0, "seed": 3}) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        base_url = json.loads(process.stdout.readline())["base_url"]
        assert base_url.startswith("http://127.0.0.1:")
        process.stdin.close()
        assert process.wait(30) == 0
        process.stdin = None


def test_a_child_ends_when_asked_to() -> None:
    """SIGTERM closes the server in good order."""
    with child({}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_child_with_a_wrong_spec_says_what_is_wrong() -> None:
    """A mistake in the spec is one line on standard error."""
    with child({"prot": 1}) as process:
        assert process.wait(30) == 1
        assert process.stderr is not None
        complaint = process.stderr.read()
    assert "prot" in complaint
    assert complaint.count("\n") == 1


async def test_a_kept_request_goes_on_with_the_new_weights(tmp_path: Path) -> None:
    """Pause with "keep" freezes an answer between two tokens; after the resume the new weights write the rest."""
    long_answer = {**FOR_TRAINING, "temperature": 0, "max_tokens": 2000}
    folders = [policy_that_says(letter).save(tmp_path / letter) for letter in "qz"]
    async with run_policy_server(weights=str(folders[0])) as base_url, aiohttp.ClientSession() as session:
        client = Client(base_url, session)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(client.ask(long_answer))
            await client.wait_for_load(running=1, waiting=0)
            await client.call("POST", "/pause?mode=keep")
            await client.reload(folders[1])
            await client.call("POST", "/resume")
        text = asked.result()[1]["choices"][0]["message"]["content"]
    assert len(text) == 2000
    assert text == "q" * text.count("q") + "z" * text.count("z")
    assert text.count("q")
    assert text.count("z")
