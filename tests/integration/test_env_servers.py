# ruff: noqa: ASYNC240  small local files
"""Env servers as real processes: how they start, die, hang, lie and are told apart, and that nothing stays behind."""

import asyncio
import json
import os
import re
import signal
import sys
import venv
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog.testing

from envs import wire
from envs.curve import ClientKeys, generate_pair
from orchestrator.env_servers.env import Env, EvalEnv, TrainEnv, TrainEnvs
from orchestrator.env_servers.processes import ChildProcess
from orchestrator.errors import EnvError, EnvLostError, EnvProtocolError, EnvStartupError
from tests.integration.env_servers import (
    MODULE,
    ROOT,
    Asked,
    alive,
    children,
    failure,
    request,
    result,
    spec,
    start_server,
    stop_started,
    supervised,
    until,
)
from tests.integration.server_envs import Bad, lines
from tests.support.chat_endpoint import chat_endpoint, completion, hang
from tests.support.env_specs import (
    env_spec,
    eval_settings,
    free_room,
    restart_policy,
    server_pids,
    train_settings,
)
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
async def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Every test ends with the processes and private directories that it began with."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = children()
    yield
    await stop_started()
    await until(lambda: children() <= before)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


async def test_a_spawned_environment_is_ready_and_runs_rollouts(tmp_path: Path) -> None:
    """Two workers come up side by side, declare their tasks, and requests spread over them."""
    async with TrainEnv(spec(tmp_path, workers=2, capacity=8), train_settings()) as env:
        assert (env.num_tasks, env.group_scored, free_room(env)) == (1000, False, 16)
        asked = Asked(env)
        asked.submit(*[request(index) for index in range(16)])
        assert free_room(env) == 0
        outcomes = [result(outcome) for outcome in await asked.wait()]
        assert [outcome.rollouts[0].reward for outcome in outcomes] == list(range(16))
        assert np.array_equal(outcomes[3].tokens, np.arange(3, 11))
        assert free_room(env) == 16
        await until(lambda: all(stats is not None and stats.done == 8 for stats in env.stats().values()))


async def test_an_environment_that_can_run_few_rollouts_at_once_is_sent_no_more(tmp_path: Path) -> None:
    """Its own limit counts where it is below the configured one, and only there."""
    async with Env(spec(tmp_path, "Narrow", capacity=8)) as env:
        assert free_room(env) == 3
    async with Env(spec(tmp_path, "Narrow", capacity=2)) as env:
        assert free_room(env) == 2


async def test_a_group_runs_side_by_side_and_is_scored_as_a_whole(tmp_path: Path) -> None:
    """The environment's score_group decides the rewards; a single rollout of such an environment is an error."""
    async with Env(spec(tmp_path, "Ranked")) as env:
        assert env.group_scored
        outcome = result(await env.run_group(request(0, count=4)))
        assert [rollout.reward for rollout in outcome.rollouts] == [0.0, 1.0, 2.0, 3.0]
        assert len(outcome.tokens) == 32
        with pytest.raises(EnvError, match="run_group"):
            await env.run_rollout(request(0))
        for index in (1, 2):
            assert failure(await env.run_group(request(index, count=4))).kind == "invalid_rollout"


async def test_an_index_is_one_task_on_two_servers_and_after_a_restart(tmp_path: Path) -> None:
    """Though the environment shuffles unseeded, and shows hashes."""
    async with supervised(Env(spec(tmp_path, "Chance", workers=2, capacity=4))) as env:
        ended = []
        for restarts in (0, 1):
            await until(lambda restarts=restarts: env.restarts == restarts and env.ready_servers == 2)  # type: ignore[misc]
            asked = Asked(env)
            asked.submit(*[request(5) for _ in range(8)])
            ended += [result(answer) for answer in await asked.wait()]
            if not restarts:
                os.kill(server_pids(env)["chance-0"], signal.SIGKILL)
        assert env.samples.keys() == {0, 1}
    assert len(ended) == 16
    assert len({one.digest for one in ended}) == 1
    assert len({one.rollouts[0].reward for one in ended}) == 1


async def test_servers_whose_tasks_differ_are_told_of_and_their_results_have_different_digests(
    tmp_path: Path,
) -> None:
    """Before the first rollout, with the index; what they answer can be told apart."""
    with structlog.testing.capture_logs() as logs:
        async with Env(spec(tmp_path, "Undecided", workers=2, capacity=1)) as env:
            asked = Asked(env)
            asked.submit(request(5), request(5))
            ended = [result(answer) for answer in await asked.wait()]
    (said,) = [entry for entry in logs if entry["event"] == "env.tasks_differ"]
    assert (said["index"], sorted(said["servers"])) == (0, ["undecided-0", "undecided-1"])
    assert ended[0].digest != ended[1].digest


async def test_unbounded_tasks_are_declared_as_such(tmp_path: Path) -> None:
    """An environment that makes its tasks up has no number of them."""
    async with EvalEnv(spec(tmp_path, "Unbounded"), eval_settings(num_examples=5)) as env:
        assert env.num_tasks is None
        assert env.examples == 5
        assert result(await env.run_rollout(request(123_456))).rollouts[0].reward == 123_456


async def test_a_rollout_reaches_the_inference_server_with_what_the_handshake_fixed(tmp_path: Path) -> None:
    """Sampling, system prompt, model and key travel once, in the handshake, and are in every request."""
    os.environ["TEST_ENV_SERVER_KEY"] = "a-secret-key"
    try:
        async with chat_endpoint() as endpoint:
            chatting = spec(
                tmp_path,
                "Chatting",
                model="policy",
                sampling={"temperature": 0.5},
                system_prompt="Be brief.",
                api_key_env="TEST_ENV_SERVER_KEY",
            )
            async with Env(chatting) as env:
                outcome = result(
                    await env.run_rollout(
                        request(2, base_url=endpoint.base_url, session="s", cache_salt="v1")
                    )
                )
                result(await env.run_rollout(request(3, base_url=endpoint.base_url, model="policy-v3-0")))
        assert endpoint.requests[1]["model"] == "policy-v3-0", "a version that is an adapter has its own name"
        assert np.array_equal(outcome.tokens, [1, 2, 3, 10, 11])
        assert np.array_equal(outcome.mask, [0, 0, 0, 1, 1])
        assert outcome.rollouts[0].metrics == {"characters": 2.0}
        asked = endpoint.requests[0]
        assert (asked["model"], asked["temperature"], asked["cache_salt"]) == ("policy", 0.5, "v1")
        assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
        assert endpoint.headers[0]["Authorization"] == "Bearer a-secret-key"
        log = (tmp_path / "logs" / "chatting-0.log").read_text()
        assert "a-secret-key" not in log
    finally:
        del os.environ["TEST_ENV_SERVER_KEY"]


async def test_the_argument_list_of_a_server_holds_no_configuration(tmp_path: Path) -> None:
    """Arguments are readable by everyone on the machine, so instructions travel over standard input."""
    async with Env(spec(tmp_path, "Gated", args={"gate": "a-secret-argument"})) as env:
        for pid in server_pids(env).values():
            assert b"a-secret-argument" not in Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_sockets_live_in_a_private_directory_that_goes_away(tmp_path: Path) -> None:
    """Only the user may enter it, its path is short, and shutdown removes it."""
    async with Env(spec(tmp_path)):
        log = (tmp_path / "logs" / "quick-0.log").read_text()
        address = next(
            msgspec.json.decode(line)["address"] for line in log.splitlines() if "listening" in line
        )
        path = Path(address.removeprefix("ipc://"))
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(path)) < 100
    assert not path.parent.exists()


async def test_every_way_to_go_wrong_is_one_failed_rollout_with_its_kind(tmp_path: Path) -> None:
    """Nothing that an environment does in a rollout takes the server or another rollout with it."""
    expected = dict.fromkeys(Bad.ways, ("invalid_rollout", False))
    expected |= {
        "raises": ("error", False),
        "exits": ("error", False),
        "cancels_itself": ("error", True),
        "broken_pipe": ("error", True),
        "recursion": ("error", False),
        "interrupts": ("error", False),
        "closes_itself": ("error", False),
        "cannot_be_shown": ("error", False),
    }
    async with Env(spec(tmp_path, "Bad")) as env:
        outcomes = {way: failure(await env.run_rollout(request(i))) for i, way in enumerate(Bad.ways)}
        assert {way: (end.kind, end.retryable) for way, end in outcomes.items()} == expected
        assert not any(end.lost for end in outcomes.values())
        assert env.restarts == 0
    records = [
        msgspec.json.decode(line) for line in (tmp_path / "logs" / "bad-0.log").read_text().splitlines()
    ]
    failed = [record for record in records if record["event"] == "rollout.failed"]
    assert [record["task"] for record in failed] == [f"bad/train/{index}" for index in range(len(Bad.ways))]
    assert "no boxed part" in failed[0]["traceback"]
    assert "server_envs.py" in failed[0]["traceback"]


@pytest.mark.parametrize("way", ["exits", "interrupts", "closes_itself", "cancels_itself"])
async def test_a_member_of_a_group_that_would_end_the_process_ends_the_group(
    way: str, tmp_path: Path
) -> None:
    """Members are tasks of their own, in which exit() and its like would end the event loop."""
    async with Env(spec(tmp_path, "Bad")) as env:
        end = failure(await env.run_group(request(Bad.ways.index(way), count=2)))
        assert end.kind == "error"
        assert failure(await env.run_rollout(request(0))).message.startswith("ValueError")
        assert env.restarts == 0


async def test_an_index_beyond_the_split_is_a_failed_rollout(tmp_path: Path) -> None:
    """The server says how many tasks there are."""
    async with Env(spec(tmp_path, args={"tasks": 3})) as env:
        end = failure(await env.run_rollout(request(3)))
        assert (end.kind, end.retryable) == ("no_such_task", False)
        assert "3 tasks" in end.message


async def test_a_run_that_takes_too_long_is_stopped_by_the_server(tmp_path: Path, gate: Path) -> None:
    """The time limit travels with the request and holds where the rollout runs."""
    async with Env(spec(tmp_path, "Gated", args={"gate": str(gate)})) as env:
        end = failure(await env.run_rollout(request(0, timeout_s=0.05)))
        assert (end.kind, end.retryable) == ("timed_out", True)
        assert env.inflight == 0


async def test_a_killed_worker_loses_and_doubles_nothing_and_comes_back(tmp_path: Path, gate: Path) -> None:
    """256 in flight on two workers, one dies by SIGKILL: its half fails at once as retryable, then all is done."""
    async with supervised(
        Env(spec(tmp_path, "Gated", args={"gate": str(gate)}, workers=2, capacity=128))
    ) as env:
        asked = Asked(env)
        requests = [request(index) for index in range(256)]
        asked.submit(*requests)
        victim = server_pids(env)["gated-0"]
        os.kill(victim, signal.SIGKILL)
        await until(lambda: sum(map(len, asked.ends.values())) == 128)
        lost = [one for one in requests if asked.ends[id(one)]]
        for one in lost:
            end = failure(asked.ends[id(one)][0])
            assert (end.kind, end.retryable, end.lost) == ("server_lost", True, True)
        assert env.inflight == 128
        await until(lambda: free_room(env) == 128)
        assert server_pids(env)["gated-0"] != victim
        assert env.restarts == 1
        again = Asked(env)
        again.submit(*[request(one.index) for one in lost])
        gate.touch()
        first = [
            outcome for outcome in await asked.wait() if outcome not in [asked.ends[id(o)][0] for o in lost]
        ]
        second = await again.wait()
        indices = sorted(result(outcome).rollouts[0].reward for outcome in [*first, *second])
        assert indices == list(range(256))


async def test_a_stopped_worker_is_noticed_killed_and_replaced(tmp_path: Path, gate: Path) -> None:
    """SIGSTOP leaves the process and its connection in place: only silence shows it."""
    quiet = spec(tmp_path, "Gated", args={"gate": str(gate)}, ping_interval_s=0.1, silence_timeout_s=5.0)
    with structlog.testing.capture_logs() as events:
        async with supervised(Env(quiet)) as env:
            asked = Asked(env)
            asked.submit(*[request(index) for index in range(16)])
            stopped = server_pids(env)["gated-0"]
            os.kill(stopped, signal.SIGSTOP)
            ends = [failure(outcome) for outcome in await asked.wait()]
            assert all(end.lost and end.retryable for end in ends)
            assert "nothing heard" in ends[0].message
            await until(lambda: env.available)
            assert not alive(stopped)
            gate.touch()
            assert result(await env.run_rollout(request(5))).rollouts[0].reward == 5.0
    frozen = next(event for event in events if event["event"] == "env.frozen")
    assert (frozen["env"], frozen["server"]) == ("gated", "gated-0")


async def test_a_poison_task_takes_only_its_own_attempts(tmp_path: Path) -> None:
    """A task that kills its server fails as lost each time, which lets its attempts be counted; others go on."""
    policy = restart_policy(max_restarts=5, first_delay_s=0.01)
    async with supervised(Env(spec(tmp_path, "Poison", restart=policy))) as env:
        for _ in range(3):
            assert failure(await env.run_rollout(request(13))).lost
        assert result(await env.run_rollout(request(12))).rollouts[0].reward == 12.0
        assert env.restarts == 3


async def test_a_server_that_keeps_dying_uses_its_budget_up(tmp_path: Path) -> None:
    """Restarts are not for ever: the environment is lost, and the error shows the server's last words."""
    env = Env(spec(tmp_path, "Poison", restart=restart_policy(max_restarts=2, first_delay_s=0.01)))
    async with env, asyncio.TaskGroup() as group:
        supervisor = group.create_task(_error_of(env))
        for _ in range(3):
            assert failure(await env.run_rollout(request(13))).lost
        error = await supervisor
    assert isinstance(error, EnvLostError)
    assert 'env "poison": server poison-0 keeps dying' in str(error)
    assert "client.welcomed" in str(error)


async def _error_of(env: Env) -> EnvError | None:
    try:
        await env.run()
    except EnvError as error:
        return error
    return None


async def test_a_server_that_never_becomes_ready_is_an_error_with_its_log(tmp_path: Path) -> None:
    """The error names the server, the time, a remedy and what the server last wrote; nothing keeps running."""
    env = Env(spec(tmp_path, "NeverReady", ready_timeout_s=0.3))
    log = tmp_path / "logs" / "neverready-0.log"
    await env.spawn()
    try:
        pids = list(server_pids(env).values())
        await until(lambda: "still reading" in log.read_text())
        with pytest.raises(
            EnvStartupError, match=r"(?s)neverready-0 not ready in 0.3 s.*ready_timeout_s.*still reading"
        ):
            await env.connect()
    finally:
        await env.shutdown()
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("BreaksOnLoad", "not where it should be"),
        ("BreaksOnSetup", "sandbox does not answer"),
        ("Absent", 'has no "Absent"'),
        ("Generated", "returned a generator; return a list of tasks"),
        ("BySplit", "returned a dict with the keys 'train', 'test'; return a list of tasks"),
    ],
)
async def test_an_environment_that_does_not_load_says_why_at_once(
    tmp_path: Path, environment: str, words: str
) -> None:
    """Its traceback or the mistake in its id is in the error, long before the readiness timeout."""
    with pytest.raises(EnvStartupError, match=f"(?s)exited with code 3.*{words}"):
        async with Env(spec(tmp_path, environment)):
            pass


async def test_tasks_may_be_a_dict_by_index(tmp_path: Path) -> None:
    """What is a dict is taken for what it holds."""
    async with Env(spec(tmp_path, "ByIndex")) as env:
        assert env.num_tasks == 2


async def test_a_breakpoint_fails_with_the_advice_to_use_env_try(tmp_path: Path) -> None:
    """A server has no terminal; what the environment logged before is in the server's log, with its level."""
    async with Env(spec(tmp_path, "Stopping")) as env:
        answer = await env.run_rollout(request(0))
    assert isinstance(answer, wire.Failure)
    assert "orchestrator env try" in answer.message
    assert re.fullmatch(r"\S+server_envs\.py:\d+ in rollout", answer.where)
    records = [json.loads(line) for line in (tmp_path / "logs" / "stopping-0.log").read_text().splitlines()]
    [logged] = [record for record in records if record["event"] == "about to stop"]
    assert (logged["level"], logged["logger"]) == ("warning", "mine")


async def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """Shutdown is bounded: after the grace the whole group is killed."""
    async with Env(spec(tmp_path, "Clinging")) as env:
        pid = server_pids(env)["clinging-0"]
        await env.shutdown(grace_s=0.3)
        assert not alive(pid)


async def test_a_rollout_that_ignores_cancellation_does_not_keep_its_server(tmp_path: Path) -> None:
    """The server gives such a rollout some seconds, then ends with an exit code that says so."""
    async with Env(spec(tmp_path, "Uncancellable")) as env:
        Asked(env).submit(request(0))
        await until(lambda: any(stats is not None and stats.inflight for stats in env.stats().values()))
        slot = env._slots[0]
        assert isinstance(slot.process, ChildProcess)
        os.kill(slot.process.pid, signal.SIGTERM)
        assert await slot.process.exited == 1
    assert "ignores cancellation" in (tmp_path / "logs" / "uncancellable-0.log").read_text()


async def test_a_call_on_a_thread_does_not_keep_its_server(tmp_path: Path) -> None:
    """Its rollout was answered; what the thread still does ends with the process, which need not be killed."""
    async with Env(spec(tmp_path, "OnThread")) as env:
        Asked(env).submit(request(0))
        await until(lambda: any(stats is not None and stats.inflight for stats in env.stats().values()))
        slot = env._slots[0]
        assert isinstance(slot.process, ChildProcess)
        os.kill(slot.process.pid, signal.SIGTERM)
        assert await slot.process.exited == 0


async def test_processes_that_an_environment_started_end_with_its_server(tmp_path: Path) -> None:
    """A server's whole process group goes when it does."""
    pids = tmp_path / "pids"
    async with Env(spec(tmp_path, "Sandboxed", args={"pids": str(pids)})) as env:
        Asked(env).submit(request(0), request(1))
        await until(lambda: len(list(lines(pids))) == 2)
        assert all(map(alive, lines(pids)))
    await until(lambda: not any(map(alive, lines(pids))))


async def test_a_server_gets_every_variable_but_the_secrets_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an environment needs of its own, such as the key of a judge, stays."""
    monkeypatch.setenv("SERVICE_TOKEN", "secret")
    monkeypatch.setenv("JUDGE_KEY", "needed")
    async with Env(spec(tmp_path, "Surroundings", withheld=frozenset({"SERVICE_TOKEN", "UNSET"}))) as env:
        ended = result(await env.run_rollout(request(0)))
    variables = msgspec.msgpack.decode(ended.transcript)[0]["messages"][0]["content"]
    assert variables["JUDGE_KEY"] == "needed"
    assert "secret" not in variables.values()


@pytest.mark.parametrize("chosen", [None, "7", "random"])
async def test_hashes_are_the_same_in_every_server_process(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that orders its tasks by hashes has the same tasks in all; a seed of the user's own holds."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if chosen is not None:
        monkeypatch.setenv("PYTHONHASHSEED", chosen)
    async with Env(spec(tmp_path, "Surroundings", workers=2, capacity=1)) as env:
        asked = Asked(env)
        asked.submit(request(0), request(1))
        ended = [result(answer) for answer in await asked.wait()]
    said = [msgspec.msgpack.decode(one.transcript)[0]["messages"][0] for one in ended]
    assert [one["content"]["PYTHONHASHSEED"] for one in said] == ["7" if chosen == "7" else "0"] * 2
    assert said[0]["hash"] == said[1]["hash"]


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_processes_in_sessions_of_their_own_end_with_their_server(how: str, tmp_path: Path) -> None:
    """Those of a rollout that were started as daemons come to the server's keeper, which ends them."""
    pids = tmp_path / "pids"
    environment = spec(tmp_path, "Sandboxed", args={"pids": str(pids), "own_session": True})
    async with Env(environment) as env:
        asked = Asked(env)
        asked.submit(request(0))
        await until(lambda: len(list(lines(pids))) == 2)
        assert all(map(alive, lines(pids)))
        if how == "killed":
            os.kill(server_pids(env)["sandboxed-0"], signal.SIGKILL)
            [end] = await asked.wait()
            assert failure(end).lost
            await until(lambda: not any(map(alive, lines(pids))))
    await until(lambda: not any(map(alive, lines(pids))))


ORCHESTRATOR = f"""
import asyncio, pathlib, sys
from orchestrator.env_servers.env import Env, RolloutRequest
from tests.support.env_specs import env_spec, server_pids
def ask(env, index, url):
    env.submit(RolloutRequest("train", index, url), print, server=env.reserve(1))
async def main(where, address):
    where = pathlib.Path(where)
    own = env_spec(name="own", id="{MODULE}:Sandboxed", args={{"pids": str(where / "sandboxes"), "own_session": True}}, workers=2,
                  log_dir=where / "logs")
    other = env_spec(name="other", id="{MODULE}:Chatting", addresses=(address,))
    async with Env(own) as env, Env(other) as elsewhere:
        ask(env, 0, "http://127.0.0.1:9/v1")
        ask(env, 1, "http://127.0.0.1:9/v1")
        ask(elsewhere, 0, sys.argv[3])
        (where / "servers").write_text("\\n".join(str(pid) for pid in server_pids(env).values()))
        await asyncio.Event().wait()
asyncio.run(main(*sys.argv[1:3]))
"""


async def test_the_death_of_the_orchestrator_ends_everything_it_started(tmp_path: Path) -> None:
    """After SIGKILL its servers and their sandboxes are gone, and its rollout elsewhere is cancelled."""
    address = f"tcp://127.0.0.1:{free_port()}"
    remote = start_server(tmp_path, address, "Chatting")
    async with chat_endpoint() as endpoint:
        endpoint.script(hang)
        orchestrator = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ORCHESTRATOR, str(tmp_path), address, endpoint.base_url
        )
        try:
            await until(lambda: len(list(lines(tmp_path / "sandboxes"))) == 4)
            await endpoint.arrived.wait()
            servers = list(lines(tmp_path / "servers"))
            assert len(servers) == 2
            # One of them is stopped: it cannot even see that its parent has gone.
            os.kill(servers[0], signal.SIGSTOP)
        finally:
            orchestrator.kill()
            await orchestrator.wait()
        await until(lambda: not any(map(alive, servers)))
        await until(lambda: not any(map(alive, lines(tmp_path / "sandboxes"))))
        await endpoint.aborted.wait()
        assert remote.running
        await remote.stop(grace_s=10)


async def test_cancelling_a_request_aborts_its_http_request(tmp_path: Path) -> None:
    """The rollout is cancelled on its server, whose connection to the engine closes; the room comes back."""
    async with chat_endpoint() as endpoint:
        endpoint.script(hang)
        async with Env(spec(tmp_path, "Chatting", capacity=1)) as env, asyncio.TaskGroup() as group:
            asking = group.create_task(env.run_rollout(request(0, base_url=endpoint.base_url)))
            await endpoint.arrived.wait()
            asking.cancel()
            await endpoint.aborted.wait()
            endpoint.script(completion())
            assert (
                result(await env.run_rollout(request(1, base_url=endpoint.base_url))).rollouts[0].reward
                == 1.0
            )


async def test_a_cancelled_request_is_not_answered_and_frees_its_room_once(
    tmp_path: Path, gate: Path
) -> None:
    """cancel is idempotent, its on_done is never called, and on_free tells when the server has stopped it."""
    async with Env(spec(tmp_path, "Gated", args={"gate": str(gate)}, capacity=4)) as env:
        freed = asyncio.Event()
        env.on_free = freed.set
        asked = Asked(env)
        requests = [request(index) for index in range(4)]
        asked.submit(*requests)
        assert env.cancel(requests[0])
        assert not env.cancel(requests[0])
        await freed.wait()
        assert free_room(env) == 1
        gate.touch()
        await until(lambda: env.inflight == 0)
        assert [len(asked.ends[id(one)]) for one in requests] == [0, 1, 1, 1]
        assert not env.cancel(requests[1])


async def test_whoever_waits_for_room_is_told_when_the_environment_shuts_down(
    tmp_path: Path, gate: Path
) -> None:
    """Both what is in flight and what has not started ends, as retryable."""
    env = Env(spec(tmp_path, "Gated", args={"gate": str(gate)}, capacity=1))
    async with asyncio.TaskGroup() as group, env:
        asking = [group.create_task(env.run_rollout(request(index))) for index in range(3)]
        await until(lambda: env.inflight == 1)
    ends = [failure(task.result()) for task in asking]
    assert [(end.kind, end.retryable) for end in ends] == [("closed", True)] * 3


async def test_a_frozen_environment_is_named_with_its_stack(tmp_path: Path) -> None:
    """Blocking code in a rollout: the orchestrator warns with the names, the server's log shows the line."""
    frozen = spec(tmp_path, "Freezing", args={"block_s": 2.5}, ping_interval_s=0.2)
    with structlog.testing.capture_logs() as events:
        async with Env(frozen) as env:
            assert isinstance(result(await env.run_rollout(request(0))), object)
            await until(
                lambda: any(stats is not None and stats.loop_lag_s > 1 for stats in env.stats().values())
            )
            assert env.restarts == 0
    warning = next(event for event in events if event["event"] == "env.frozen")
    assert (warning["env"], warning["server"], warning["inflight"]) == ("freezing", "freezing-0", 1)
    records = [
        msgspec.json.decode(line) for line in (tmp_path / "logs" / "freezing-0.log").read_text().splitlines()
    ]
    blocked = next(record for record in records if record["event"] == "server.loop_blocked")
    assert "train/0" in blocked["by"]
    assert "time.sleep" in blocked["stack"]


async def test_draining_finishes_what_runs_and_accepts_nothing_new(tmp_path: Path, gate: Path) -> None:
    """After drain() every request has its answer, and a further one is turned away as retryable."""
    async with Env(spec(tmp_path, "Gated", args={"gate": str(gate)})) as env, asyncio.TaskGroup() as group:
        asked = Asked(env)
        asked.submit(request(0), request(1))
        draining = group.create_task(env.drain())
        await until(lambda: any(stats is not None and stats.inflight == 2 for stats in env.stats().values()))
        assert not draining.done()
        gate.touch()
        await draining
        assert len([result(outcome) for outcome in await asked.wait()]) == 2
        end = failure(await env.run_rollout(request(2)))
        assert (end.kind, end.retryable) == ("not_accepted", True)


async def test_a_remote_server_that_is_restarted_is_used_again(tmp_path: Path, gate: Path) -> None:
    """What was in flight fails at once, by its closed connection or by its last words; when it is back, it is used again."""
    address = f"tcp://127.0.0.1:{free_port()}"
    server = start_server(tmp_path, address, "Gated", args={"gate": str(gate)})
    async with supervised(Env(spec(tmp_path, "Gated", addresses=(address,)))) as env:
        asked = Asked(env)
        asked.submit(*[request(index) for index in range(8)])
        await until(lambda: any(stats is not None and stats.inflight == 8 for stats in env.stats().values()))
        await server.stop(grace_s=0)
        ends = [failure(outcome) for outcome in await asked.wait()]
        # Its keeper is killed, and the server may still answer before the kernel ends it too.
        assert all(end.retryable and (end.lost or end.kind == "server_stopping") for end in ends)
        await until(lambda: not env.available)
        server = start_server(tmp_path, address, "Gated", args={"gate": str(gate)})
        gate.touch()
        assert result(await env.run_rollout(request(3))).rollouts[0].reward == 3.0
    await server.stop(grace_s=10)


async def test_a_server_at_an_address_where_nothing_listens_is_an_error(tmp_path: Path) -> None:
    """It names the address."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(EnvStartupError, match=f"not ready in 0.3 s at {address}"):
        async with Env(spec(tmp_path, addresses=(address,), ready_timeout_s=0.3)):
            pass


async def test_a_server_of_another_environment_is_refused_with_both_named(tmp_path: Path) -> None:
    """The operator sees what was asked for and what is there."""
    address = f"tcp://127.0.0.1:{free_port()}"
    server = start_server(tmp_path, address, "Quick")
    with pytest.raises(
        EnvProtocolError, match=f'asks for environment "{MODULE}:Gated", this server has "{MODULE}:Quick"'
    ):
        async with Env(spec(tmp_path, "Gated", addresses=(address,))):
            pass
    await server.stop(grace_s=10)


async def test_siblings_that_disagree_about_their_tasks_are_refused_with_both_named(tmp_path: Path) -> None:
    """Two servers of one environment must have the same tasks, or an index means two things."""
    ports = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    servers = [start_server(tmp_path, port, args={"tasks": 10 + place}) for place, port in enumerate(ports)]
    with pytest.raises(EnvProtocolError, match=r"quick-\d declares tasks .*1[01]}, server quick-\d .*1[01]}"):
        async with Env(spec(tmp_path, addresses=tuple(ports))):
            pass
    for server in servers:
        await server.stop(grace_s=10)


async def test_a_split_that_there_is_not_is_refused(tmp_path: Path) -> None:
    """The environment's own complaint is in the error."""
    address = f"tcp://127.0.0.1:{free_port()}"
    server = start_server(tmp_path, address)
    with pytest.raises(EnvProtocolError, match=r'no split "absent".*KeyError'):
        async with Env(spec(tmp_path, addresses=(address,), split="absent")):
            pass
    await server.stop(grace_s=10)


async def test_training_and_evaluation_share_a_remote_server(tmp_path: Path) -> None:
    """Every client has its own lease and its own room; one leaving does not disturb the other."""
    address = f"tcp://127.0.0.1:{free_port()}"
    server = start_server(tmp_path, address, capacity=2)
    async with Env(spec(tmp_path, name="train", addresses=(address,))) as train:
        async with Env(
            spec(tmp_path, name="eval", split="eval", train=False, addresses=(address,))
        ) as evaluation:
            assert (free_room(train), free_room(evaluation)) == (2, 2)
            assert isinstance(await evaluation.run_rollout(request(1, split="eval")), object)
        assert result(await train.run_rollout(request(2))).rollouts[0].reward == 2.0
    await server.stop(grace_s=10)


async def test_keys_let_the_right_client_in_and_nobody_else(tmp_path: Path) -> None:
    """A client with the server's key and a key that the server knows is served; a stranger learns why it is not."""
    server_pair, client_pair, stranger = generate_pair(), generate_pair(), generate_pair()
    address = f"tcp://127.0.0.1:{free_port()}"
    server = start_server(
        tmp_path,
        address,
        curve_secret=server_pair.secret,
        curve_public=server_pair.public,
        curve_clients=[client_pair.public],
    )
    keys = ClientKeys(client_pair, server_pair.public)
    async with Env(spec(tmp_path, addresses=(address,), keys=keys)) as env:
        assert result(await env.run_rollout(request(4))).rollouts[0].reward == 4.0
        for wrong in (
            ClientKeys(stranger, server_pair.public),
            ClientKeys(client_pair, stranger.public),
            None,
        ):
            # The server says no to the first of them; the others hear nothing, however long they wait.
            is_told = wrong is not None and wrong.own is stranger
            ready_s = 5.0 if is_told else 0.5
            outsider = spec(
                tmp_path, name="outsider", addresses=(address,), keys=wrong, ready_timeout_s=ready_s
            )
            with pytest.raises(EnvStartupError, match=f"not ready in {ready_s:g} s") as error:
                async with Env(outsider):
                    pass
            if is_told:
                assert "CURVE keys" in str(error.value)
        assert result(await env.run_rollout(request(5))).rollouts[0].reward == 5.0
    await server.stop(grace_s=10)
    log = (tmp_path / "elsewhere.log").read_text()
    assert server_pair.secret not in log
    assert client_pair.secret not in log


@pytest.mark.parametrize("insecure", [False, True])
async def test_binding_off_loopback_without_keys_needs_an_explicit_word(
    tmp_path: Path, insecure: bool
) -> None:
    """The server refuses to start and says how to do it properly."""
    server = start_server(tmp_path, f"tcp://0.0.0.0:{free_port()}", insecure=insecure)
    if insecure:
        await until(lambda: "server.ready" in server.log_tail())
        assert await server.stop(grace_s=10) == 0
    else:
        assert await server.exited == 3
        assert "env keygen" in server.log_tail()


async def test_an_address_in_use_is_one_line(tmp_path: Path) -> None:
    """Two servers on one port: the second says which address it was."""
    address = f"tcp://127.0.0.1:{free_port()}"
    first = start_server(tmp_path, address)
    await until(lambda: "server.ready" in first.log_tail())
    second = start_server(tmp_path, address)
    assert await second.exited == 3
    assert f"cannot bind {address}" in second.log_tail()
    await first.stop(grace_s=10)


def _virtualenv(path: Path, *, packages: Iterator[str] | None) -> str:
    """A virtualenv of its own, with or without what env servers need."""
    venv.create(path, with_pip=False, symlinks=True)
    site = next(path.glob("lib/python*/site-packages"))
    if packages is not None:
        (site / "needed.pth").write_text("\n".join(packages))
    return str(path / "bin" / "python")


async def test_an_environment_runs_under_another_interpreter(tmp_path: Path) -> None:
    """Its server finds our package there, and the interpreter is the other one."""
    python = _virtualenv(tmp_path / "other", packages=(p for p in sys.path if p.endswith("site-packages")))
    async with Env(spec(tmp_path, "WhereAmI", python=python)) as env:
        outcome = result(await env.run_rollout(request(0)))
    [entry] = msgspec.msgpack.decode(outcome.transcript)
    assert entry["messages"][0]["content"] == str(tmp_path / "other")


async def test_an_interpreter_without_what_servers_need_is_told_what_to_install(tmp_path: Path) -> None:
    """The error has the command, not only a traceback."""
    python = _virtualenv(tmp_path / "bare", packages=None)
    with pytest.raises(
        EnvStartupError, match=rf"{python} lacks \w+; run: {python} -m pip install msgspec pyzmq"
    ):
        async with Env(spec(tmp_path, python=python)):
            pass


async def test_an_interpreter_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    """The path is in the message."""
    with pytest.raises(EnvStartupError, match=r"cannot be started: .*/no/such/python"):
        async with Env(spec(tmp_path, python="/no/such/python")):
            pass


async def test_a_directory_named_like_our_package_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users keep their environments in a folder called envs, too."""
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("raise ImportError('the wrong package')")
    monkeypatch.chdir(tmp_path)
    async with Env(spec(tmp_path)) as env:
        assert env.available


async def test_environments_start_and_stop_side_by_side(tmp_path: Path) -> None:
    """Two environments that take a second each to load are both ready once connect returns; one failure ends all."""
    envs = TrainEnvs(
        [TrainEnv(spec(tmp_path, name=name, args={"load_s": 0.2}), train_settings()) for name in ("a", "b")]
    )
    await envs.spawn()
    try:
        await envs.connect()
        assert [envs[name].available for name in envs] == [True, True]
    finally:
        await envs.shutdown()


async def test_connecting_without_a_server_or_an_address_is_an_error() -> None:
    """There is nothing to connect to."""
    with pytest.raises(EnvError, match="spawn"):
        await Env(env_spec(name="lonely")).connect()


def test_the_protocol_is_the_documented_one() -> None:
    """A change of the wire's meaning needs a new number, here as in the documentation."""
    assert wire.PROTOCOL == 2
