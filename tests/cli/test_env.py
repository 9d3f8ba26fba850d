"""`orchestrator env …`: what it prints, what it refuses in one line, and what it starts and ends."""

import argparse
import asyncio
import json
import logging
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq

from envs import Environment, Model, Rollout, Task, wire
from envs.loader import LOADERS
from orchestrator.cli.env import UsageError, parse_pairs, register
from orchestrator.cli.env_serve import build_specs, shown_addresses, worker_addresses
from tests.support.chat_endpoint import ChatEndpoint, chat_endpoint, completion, status

HERE = "tests.cli.test_env"


class Raises(Environment):
    """An environment with a bug in its rollout."""

    def tasks(self, split: str) -> list[Task]:
        return [{}]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        raise KeyError("the bug")


class Wants(Environment):
    """Shows what it was given."""

    def __init__(self, word: str = "none", factor: float = 1.0) -> None:
        self.word = word
        self.factor = factor

    def tasks(self, split: str) -> list[Task]:
        return [{"text": f"{split}-{index}-{self.word}"} for index in range(3)]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        await model.chat([{"role": "user", "content": task["text"]}])
        return model.rollout(reward=self.factor, metrics={"speed": 2.0})


class NoSetup(Raises):
    """Cannot load."""

    async def setup(self) -> None:
        raise OSError("no dataset")


class Talks(Wants):
    """Prints and logs."""

    async def rollout(self, task: Task, model: Model) -> Rollout:
        print("printed by the environment")  # noqa: T201  what is tested
        logging.getLogger("talks").warning("logged by %s", "the environment")
        logging.getLogger("talks").debug("a detail")
        return await super().rollout(task, model)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def run(*words: str) -> int:
    """Run a command line in this process; its exit code."""
    parser = argparse.ArgumentParser(prog="orchestrator")
    register(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["env", *words])
    code: int = arguments.run(arguments)
    return code


class EndpointThread:
    """A chat endpoint with a loop of its own, for commands that run theirs in this thread."""

    def __enter__(self) -> ChatEndpoint:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="endpoint")
        self._thread.start()
        self._ready.wait(30)
        return self._endpoint

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(30)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        async with chat_endpoint() as self._endpoint:
            self._ready.set()
            await self._done.wait()


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    with EndpointThread() as running:
        yield running


def test_list_shows_every_built_in_with_a_line_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    """And how one's own are named."""
    assert run("list") == 0
    shown = capsys.readouterr().out
    assert "builtin::reverse" in shown
    assert "write a word backwards" in shown
    assert "module:Class" in shown


def test_list_begins_with_the_families_and_how_each_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Every loader has a line, also one whose library is missing here."""
    assert run("list") == 0
    families = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert [line.split("::")[0] for line in families if "::" in line] == [*LOADERS, "<domain>"]
    assert any(line.startswith("dataset::<file>  ") for line in families)


def test_try_without_a_server_uses_the_local_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """An author needs nothing but the environment."""
    assert run("try", "reverse", "-n", "2", "--max-tokens", "6") == 0
    shown = capsys.readouterr().out
    assert "model local" in shown
    assert shown.count("reverse aab") == 2
    assert "rollout 2" in shown
    assert "reward" in shown
    assert "tokens, sampled" in shown
    assert "inference" in shown


def test_try_of_a_group_scored_environment_scores_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    """All rollouts belong to one group."""
    assert run("try", "agree", "-n", "3", "--args", "latency_s=0", "--max-tokens", "4") == 0
    shown = capsys.readouterr().out
    assert "scored as a group" in shown
    assert "rollout 3" in shown


def test_try_passes_everything_on(endpoint: ChatEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments, split, index, sampling, system prompt and model reach the environment and the endpoint."""
    endpoint.script(completion("[bold]said[/bold]"))
    words = ["--base-url", endpoint.base_url, "--model", "big", "-n", "1", "--split", "eval", "--index", "2"]
    words += ["--args", "word=hi", "--args", '{"factor": 0.5}', "--system-prompt", "be kind"]
    words += ["--max-tokens", "9", "--temperature", "0.25", "--sampling", "seed=3"]
    assert run("try", f"{HERE}:Wants", *words) == 0
    (request,) = endpoint.requests
    assert request["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "eval-2-hi"},
    ]
    assert {key: request[key] for key in ("model", "max_tokens", "temperature", "seed")} == {
        "model": "big",
        "max_tokens": 9,
        "temperature": 0.25,
        "seed": 3,
    }
    shown = capsys.readouterr().out
    assert "reward 0.5" in shown
    assert "[bold]said[/bold]" in shown
    assert "speed 2" in shown
    assert "split eval (3 tasks), task 2" in shown


def test_try_prints_nothing_that_a_terminal_would_obey(
    endpoint: ChatEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model may answer with escape sequences, which must neither move the cursor nor rename the window."""
    endpoint.script(completion("\x1b]0;owned\x07a\x1b[2Jb\u009bc\rd\te\nf"))
    words = ("--base-url", endpoint.base_url, "--model", "m\x1b[31m", "-n", "1")
    assert run("try", f"{HERE}:Wants", *words) == 0
    shown = capsys.readouterr().out
    assert not set(shown) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))}
    assert "]0;owneda[2Jbcd" in shown
    assert "e\nf\n" in shown


class Undecided(Wants):
    """Its second task is another one in every process."""

    def tasks(self, split: str) -> list[Task]:
        return [{"text": "same"}, {"text": f"task of process {os.getpid()}"}, {"text": "same too"}]


class Chance(Wants):
    """Shuffles without a seed, and orders by hashes."""

    def tasks(self, split: str) -> list[Task]:
        words = list({f"word {number}" for number in range(30)})
        random.shuffle(words)
        return [{"text": word} for word in words]


def test_a_check_finds_tasks_that_differ_between_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """It names them, shows one as both processes have it, and runs nothing."""
    assert run("try", f"{HERE}:Undecided", "--check") == 1
    printed = capsys.readouterr().out
    assert "1 of the first 3 tasks of split train differ: 1" in printed
    assert printed.count("task of process") == 2
    assert "rollout 1" not in printed


def test_a_check_of_what_is_drawn_by_chance_passes(
    endpoint: ChatEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """Because generators are seeded as in servers; the rollouts follow."""
    words = ["--check", "20", "-n", "1", "--model", "m", "--base-url", endpoint.base_url]
    assert run("try", f"{HERE}:Chance", *words) == 0
    printed = capsys.readouterr().out
    assert "the first 20 tasks of split train are the same in two processes" in printed
    assert "rollout 1" in printed


def test_a_check_of_what_cannot_be_loaded_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With the environment's own reason."""
    assert run("try", f"{HERE}:NoSetup", "--check") == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        r'error: setup of ".*:NoSetup" raised OSError: no dataset, at \S+:\d+ in setup\n', said
    )


def test_try_takes_the_split_from_the_id(endpoint: ChatEndpoint) -> None:
    """As the configuration does."""
    assert run("try", f"{HERE}:Wants@eval", "--base-url", endpoint.base_url, "--model", "m", "-n", "1") == 0
    assert endpoint.requests[0]["messages"][0]["content"] == "eval-0-none"


def test_try_for_an_evaluation_needs_no_token_ids(
    endpoint: ChatEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --eval their absence is a failure that says what to do."""
    plain = completion("x")
    del plain["prompt_token_ids"], plain["choices"][0]["token_ids"]
    endpoint.script(plain)
    words = ("try", f"{HERE}:Wants", "--base-url", endpoint.base_url, "--model", "m", "-n", "1")
    assert run(*words) == 1
    assert "no_token_ids" in capsys.readouterr().out
    assert run(*words, "--eval") == 0


def test_try_shows_a_failed_rollout_with_the_place_of_the_bug(capsys: pytest.CaptureFixture[str]) -> None:
    """And exits with 1."""
    assert run("try", f"{HERE}:Raises", "-n", "1") == 1
    shown = capsys.readouterr().out
    assert "rollout 1 failed" in shown
    assert "KeyError: 'the bug'" in shown
    assert "test_env.py" in shown


def test_what_an_environment_prints_and_logs_is_shown(
    endpoint: ChatEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """Log records with their level and logger; details on request."""
    words = ("try", f"{HERE}:Talks", "--base-url", endpoint.base_url, "--model", "m", "-n", "1")
    assert run(*words) == 0
    shown = capsys.readouterr()
    assert "printed by the environment" in shown.out
    assert re.search(r"\[warning *\] logged by the environment .*talks", shown.err)
    assert "a detail" not in shown.err
    assert run(*words, "--log-level", "debug") == 0
    assert "a detail" in capsys.readouterr().err


def test_try_of_an_environment_that_does_not_load_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    """As a server of it would."""
    assert run("try", f"{HERE}:NoSetup", "-n", "1") == 3
    assert "no dataset" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["try", "revers"], 'did you mean "reverse"?'),
        (["try", "reverse", "--args", "lenth=3"], "it takes letters, length"),
        (["try", "reverse", "--args", "lenth"], "neither key=value nor a JSON object"),
        (["try", "reverse", "--args", "{oops"], "is not a JSON object"),
        (["try", "reverse", "--sampling", "n=2"], "sampling must not set n"),
        (["try", "reverse", "--base-url", "localhost"], "is not like http://"),
        (["try", "reverse", "--base-url", "http://127.0.0.1:1/v1"], "is the inference server up?"),
        (["try", "reverse", "--api-key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE is not set"),
        (["serve", "reverse", "--bind", "tcp://0.0.0.0:7000"], "no keys"),
        (["serve", "reverse", "--bind", "7000"], "neither tcp://HOST:PORT nor ipc://PATH"),
        (["serve", "reverse", "--bind", "tcp://127.0.0.1:0"], "known beforehand"),
        (["serve", "reverse", "--bind", "tcp://127.0.0.1:65535", "--workers", "2"], "ports"),
        (["serve", "@", "--bind", "tcp://127.0.0.1:7000"], "environment id"),
        (["serve", "reverse", "--secret-key-file", "/does/not/exist"], "/does/not/exist"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    """Nothing is started and no traceback is shown."""
    assert run(*words) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1


def test_a_server_without_models_asks_for_the_name(
    endpoint: ChatEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some proxies list none."""
    endpoint.script(status(404))
    assert run("try", "reverse", "--base-url", endpoint.base_url) == 2
    assert "--model" in capsys.readouterr().err


def test_values_are_json_where_they_can_be() -> None:
    """Otherwise text; later ones win."""
    given = ["a=1", "b=x y", "c=[1, 2]", "d=", "e=true", 'f="1"', '{"g": {"h": null}, "a": 2}']
    assert parse_pairs(given, "--args") == {
        "a": 2,
        "b": "x y",
        "c": [1, 2],
        "d": "",
        "e": True,
        "f": "1",
        "g": {"h": None},
    }


def test_workers_have_consecutive_addresses() -> None:
    """Ports that follow each other, or numbered socket files."""
    assert worker_addresses("tcp://127.0.0.1:7000", 3) == [
        f"tcp://127.0.0.1:{port}" for port in (7000, 7001, 7002)
    ]
    assert worker_addresses("tcp://[::1]:7000", 1) == ["tcp://[::1]:7000"]
    assert worker_addresses("ipc:///tmp/x", 2) == ["ipc:///tmp/x-0", "ipc:///tmp/x-1"]
    assert worker_addresses("ipc:///tmp/x", 1) == ["ipc:///tmp/x"]


def test_the_addresses_line_can_be_pasted_elsewhere() -> None:
    """A wildcard becomes this machine's name; the line is TOML."""
    import tomllib

    specs = build_specs("reverse", bind="tcp://0.0.0.0:7000", workers=2, args={}, insecure=True)
    addresses = tomllib.loads(shown_addresses(specs))["addresses"]
    assert [address.rsplit(":", 1)[1] for address in addresses] == ["7000", "7001"]
    assert not any("0.0.0.0" in address for address in addresses)


def test_keygen_makes_keys_that_serve_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Secrets are readable by their owner alone, never printed, and never overwritten."""
    keys = tmp_path / "keys"
    assert run("keygen", str(keys)) == 0
    shown = capsys.readouterr().out
    for name in ("server.secret", "client.secret"):
        assert stat.S_IMODE((keys / name).stat().st_mode) == 0o600
        assert (keys / name).read_text().strip() not in shown
    secret, client = str(keys / "server.secret"), str(keys / "client.public")
    specs = build_specs(
        "reverse", bind="tcp://0.0.0.0:7000", workers=1, args={}, secret_key=secret, client_keys=[client]
    )
    assert specs[0].curve_public == (keys / "server.public").read_text().strip()
    with pytest.raises(UsageError, match="belong together"):
        build_specs("reverse", bind="tcp://0.0.0.0:7000", workers=1, args={}, secret_key=secret)
    assert run("keygen", str(keys)) == 2


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short directory: the path of a Unix socket must fit in some hundred bytes."""
    directory = Path(tempfile.mkdtemp(prefix="envs-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


def greet(context: zmq.Context[zmq.Socket[bytes]], address: str, *, other_than: int = 0) -> int:
    """Say hello until a server other than the given process answers; its process id."""
    hello = wire.Hello(protocol=wire.PROTOCOL, client="test", env="reverse", model="m", sampling={})
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        while True:
            socket.send(wire.encode(hello))
            while socket.poll(500):
                message = wire.decode_to_client(socket.recv_multipart())
                if isinstance(message, wire.Welcome) and message.pid != other_than:
                    return message.pid


def start_serve(*words: str) -> subprocess.Popen[str]:
    code = (
        "import argparse, sys; from orchestrator.cli.env import register; p = argparse.ArgumentParser();"
        "register(p.add_subparsers()); a = p.parse_args(sys.argv[1:]); sys.exit(a.run(a))"
    )
    argv = [sys.executable, "-c", code, "env", "serve", *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_serve_hosts_workers_restarts_a_killed_one_and_ends_them_all(sockets: Path) -> None:
    """Each worker answers; one that dies is back; SIGTERM ends everything with exit code 0."""
    process = start_serve("reverse", "--bind", f"ipc://{sockets}/s", "--workers", "2")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        addresses: list[Any] = json.loads(line.removeprefix("addresses = "))
        with zmq.Context() as context:
            pids = [greet(context, address) for address in addresses]
            os.kill(pids[0], signal.SIGKILL)
            pids.append(greet(context, addresses[0], other_than=pids[0]))
        assert len(set(pids)) == 3
        process.terminate()
        _, log = process.communicate()
        assert process.returncode == 0
        assert "worker.restarted" in log
        assert not any(alive(pid) for pid in pids)
    finally:
        process.kill()
        process.communicate()


def test_serve_of_an_environment_that_cannot_load_exits_with_3(sockets: Path) -> None:
    """A supervisor sees that starting again will not help; the log says why."""
    process = start_serve("revers", "--bind", f"ipc://{sockets}/s", "--workers", "2")
    _, log = process.communicate()
    assert process.returncode == 3
    assert "did you mean" in log
