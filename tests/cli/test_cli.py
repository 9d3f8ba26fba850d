"""The command line: what `check` and `status` print, exit codes, and one line for a user's mistake."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator import __version__
from orchestrator.cli import build_parser, main
from orchestrator.views.http import build_app, serve_http
from tests.support.sample_status import env_status, sample_status

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).parent / "orchestrator"
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


@pytest.fixture(autouse=True)
def _no_settings_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("ORCHESTRATOR__"):
            monkeypatch.delenv(name)


class Said:
    """What a command said and with which code it ended."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: str) -> None:
        try:
            self.code = main(argv)
        except SystemExit as end:  # what argparse does at a word that it does not know
            self.code = int(end.code or 0)
        self.out, self.err = capsys.readouterr()
        assert "Traceback" not in self.err


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    """The installed command, as a process of its own."""
    return subprocess.run([COMMAND, *argv], capture_output=True, text=True, check=False)


class TestCheck:
    def test_the_resolved_config_is_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Every setting, defaults and overrides included, as JSON."""
        said = Said(capsys, "check", QUICKSTART, "--batch.size", "64", "--seed=-3", "--http.port", "0")
        shown = json.loads(said.out.partition("\nwould start:")[0])
        assert said.code == 0
        assert (shown["batch"]["size"], shown["seed"], shown["journal"]["compress_level"]) == (64, -3, 0)

    def test_what_would_be_started_is_listed(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Servers, trainer, links and the run directory, a line each."""
        lines = Said(capsys, "check", QUICKSTART, "--http.port=8601", "--local.learning_rate=2").out
        assert [line.strip() for line in lines.partition("would start:\n")[2].splitlines()] == [
            "policy server on 127.0.0.1 (local)",
            "reference trainer, learning rate 2",
            'train env "reverse" (builtin::reverse): 1 server process(es)',
            'train env "agree" (builtin::agree): 1 server process(es)',
            'train env "lookup" (builtin::lookup): 1 server process(es)',
            "trainer link at tcp://127.0.0.1, a free port, 1 rank(s)",
            "HTTP at http://127.0.0.1:8601",
            "run directory runs/quickstart",
        ]

    def test_nothing_is_written(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Checking leaves no run directory behind."""
        monkeypatch.chdir(tmp_path)
        assert Said(capsys, "check", QUICKSTART).code == 0
        assert list(tmp_path.iterdir()) == []

    def test_warnings_go_to_standard_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A configuration that is merely odd passes."""
        said = Said(
            capsys,
            "check",
            QUICKSTART,
            "--train.env.reverse.min_batch_allocation=0.9",
            "--train.env.agree.min_batch_allocation=0.9",
        )
        assert said.code == 0
        assert "warning: train.env: minimums sum to 190%; they are scaled down to 100 %" in said.err

    def test_problems_are_listed_and_nothing_else_is_printed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Exit code 2, all problems on standard error, no half-printed configuration."""
        said = Said(capsys, "check", QUICKSTART, "--batch.sise=1", "--seed=x")
        assert (said.code, said.out) == (2, "")
        assert f"orchestrator: {QUICKSTART}: 2 problems" in said.err
        assert (
            '  batch.sise: unknown key; did you mean "size"? (set by --batch.sise)' in said.err.splitlines()
        )

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("--mix.strategy=flwo", 'no mix strategy is named "flwo"'),
            ("--mix.options={ gian = 1 }", 'has no option "gian"'),
            ("--dispatch.advantage=gpro", 'dispatch.advantage: "gpro" is not one of grpo'),
            ("--inference.weight_update=nccl", 'inference.weight_update: "nccl" is not one of'),
            ("--train.env.reverse.id=::", 'env "reverse": environment id "::" is not'),
            ("--http.token_env=NO_SUCH_VARIABLE", "http.token_env: the environment variable NO_SUCH_VARIABLE"),
            ("--inference.api_key_env=NO_SUCH_VARIABLE", "inference.api_key_env: the environment variable"),
        ],
    )  # fmt: skip
    def test_what_would_fail_at_the_start_fails_here(
        self, capsys: pytest.CaptureFixture[str], override: str, words: str
    ) -> None:
        """Names of parts and of variables are looked up as a run would, before anything is spawned."""
        said = Said(capsys, "check", QUICKSTART, override)
        assert (said.code, said.out) == (2, "")
        assert words in said.err

    def test_all_that_would_fail_is_told_at_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        """One look is enough to mend them all."""
        said = Said(capsys, "check", QUICKSTART, "--mix.strategy=x", "--dispatch.advantage=y")
        assert 'named "x"' in said.err
        assert '"y" is not one of' in said.err


class TestMistakes:
    @pytest.mark.parametrize("command", ["run", "check", "eval", "simulate"])
    def test_a_missing_file_is_one_line(self, capsys: pytest.CaptureFixture[str], command: str) -> None:
        """Every command that takes a configuration says so and exits with 2."""
        said = Said(capsys, command, "nowhere.toml")
        assert (said.code, said.err) == (2, "orchestrator: nowhere.toml: there is no such file\n")

    def test_a_run_that_cannot_be_configured_starts_nothing(self, tmp_path: Path) -> None:
        """Exit code 2, and not even the run directory is made."""
        run_dir = tmp_path / "run"
        done = command("run", QUICKSTART, f"--run_dir={run_dir}", "--http.token_env=NO_SUCH_VARIABLE")
        assert done.returncode == 2
        assert "NO_SUCH_VARIABLE is not set" in done.stderr
        assert not run_dir.exists()

    @pytest.mark.parametrize(
        "argv", [[], ["fly"], ["status", "--fast"], ["simulate", QUICKSTART, "--batch.size", "64"]]
    )
    def test_words_that_are_not_known(self, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
        """Only commands that take overrides take unknown options."""
        said = Said(capsys, *argv)
        assert said.code == 2
        assert "usage: orchestrator" in said.err

    def test_the_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        """--version prints it."""
        said = Said(capsys, "--version")
        assert (said.code, said.out.strip()) == (0, __version__)

    def test_every_command_explains_itself(self) -> None:
        """Each has a line in the overview."""
        text = build_parser().format_help()
        for command in ("run", "check", "eval", "env", "simulate", "status"):
            assert f"\n    {command} " in text


class TestStatus:
    async def served(self, *argv: str, token: str | None = None) -> tuple[int, str]:
        """The code of `status` against a service that is there, and the service's address."""
        app = build_app(status=sample_status, metrics=bytes, token=token)
        async with serve_http(app, host="127.0.0.1", port=0) as address:
            words = [word.replace("ADDRESS", address) for word in argv]
            return await asyncio.to_thread(main, ["status", *words]), address

    async def test_a_running_service_is_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The same picture as the live display, and why the next batch is not there."""
        code, _ = await self.served("--url", "ADDRESS")
        out = capsys.readouterr().out
        assert code == 0
        assert "math" in out
        assert "state: running; batch: 24 sequences are missing" in out

    async def test_failures_stand_with_what_the_last_one_said(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The author's file and line are in it."""
        reasons = {"math: error": "KeyError: 'missing', at mine.py:15 in rollout"}
        status = sample_status(failures={"math: error": 8, "math: lost": 1}, failure_reasons=reasons)
        app = build_app(status=lambda: status, metrics=bytes, token=None)
        async with serve_http(app, host="127.0.0.1", port=0) as address:
            assert await asyncio.to_thread(main, ["status", "--url", address]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "failed: math: error (8 rollouts), the last: KeyError: 'missing', at mine.py:15 in" in shown
        assert "failed: math: lost (1 rollouts)" in shown

    async def test_servers_elsewhere_stand_with_their_nodes(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A line for each env that has some; servers of the orchestrator's own machine need none."""
        nodes = {"math-0": "10.0.0.7", "math-1": "10.0.0.8"}
        status = sample_status(envs={"math": env_status(nodes=nodes), "code": env_status()})
        app = build_app(status=lambda: status, metrics=bytes, token=None)
        async with serve_http(app, host="127.0.0.1", port=0) as address:
            assert await asyncio.to_thread(main, ["status", "--url", address]) == 0
        shown = capsys.readouterr().out
        assert "servers of math: math-0 on 10.0.0.7, math-1 on 10.0.0.8" in shown
        assert "servers of code" not in shown

    async def test_the_raw_status(self, capsys: pytest.CaptureFixture[str]) -> None:
        """--json prints what programs read."""
        code, _ = await self.served("--json", "--url", "ADDRESS/")
        shown: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (code, shown["step"], shown["envs"]["math"]["inflight"]) == (0, 5, 12)

    async def test_what_answers_cannot_steer_the_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Whatever it sends, as a status or in place of one, and whatever it gives as a reason."""
        hostile = "\x1b[2J\x1b]0;title\x07"
        status = sample_status(envs={f"math{hostile}": env_status()}, buffer=hostile, state=hostile)
        app = build_app(status=lambda: status, metrics=bytes, token=None)
        async with serve_http(app, host="127.0.0.1", port=0) as address:
            assert await asyncio.to_thread(main, ["status", "--url", address]) == 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = await reader.readuntil(b"\r\n\r\n")
            code = b"200" if b"/raw/" in request else b"500"
            writer.write(b"HTTP/1.0 " + code + b" no\x1b[2J\r\n\r\n{\x1b[2J\xff}\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            assert await asyncio.to_thread(main, ["status", "--json", "--url", f"{address}/raw"]) == 0
            assert await asyncio.to_thread(main, ["status", "--url", f"{address}/raw"]) == 1
            assert await asyncio.to_thread(main, ["status", "--url", address]) == 1
        said = capsys.readouterr()
        assert not set("\x1b\x07") & set(said.out + said.err)
        assert "math�[2J" in said.out
        assert "500 no�[2J" in said.err

    async def test_the_address_is_found_in_the_run_directory(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """A run directory is as good as an address."""
        app = build_app(status=sample_status, metrics=bytes, token=None)
        async with serve_http(app, host="127.0.0.1", port=0) as address:
            (tmp_path / "addresses.json").write_text(json.dumps({"http": address}))
            assert await asyncio.to_thread(main, ["status", str(tmp_path)]) == 0
        assert "state: running" in capsys.readouterr().out

    async def test_the_status_of_another_run_on_the_same_port_is_not_shown(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """A run that was killed leaves its address behind; who starts another finds the port free, and takes it."""
        app = build_app(status=sample_status, metrics=bytes, token=None, run_id="mine")
        async with serve_http(app, host="127.0.0.1", port=0) as address:
            told = tmp_path / "addresses.json"
            told.write_text(json.dumps({"run": "another", "http": address}))
            assert await asyncio.to_thread(main, ["status", str(tmp_path)]) == 1
            assert "another run answers there" in capsys.readouterr().err
            told.write_text(json.dumps({"run": "mine", "http": address}))
            assert await asyncio.to_thread(main, ["status", str(tmp_path)]) == 0

    async def test_the_token_is_read_from_a_variable(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without it the refusal is told in one line."""
        monkeypatch.setenv("STATUS_TOKEN", "secret")
        code, _ = await self.served("--url", "ADDRESS", "--token-env", "STATUS_TOKEN", token="secret")
        assert code == 0
        capsys.readouterr()
        code, address = await self.served("--url", "ADDRESS", token="secret")
        assert (code, capsys.readouterr().err) == (
            1,
            f"orchestrator: {address}/api/status: 401 Unauthorized\n",
        )

    @pytest.mark.parametrize(
        ("addresses", "words"),
        [
            (None, "there is no such file"),
            ("{", "cannot be read"),
            ("[]", "cannot be read"),
            ("{}", "cannot be read"),
            ('{"http": null}', "does not serve HTTP"),
        ],
    )
    def test_a_directory_that_is_no_runs(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, addresses: str | None, words: str
    ) -> None:
        """Whatever is found in its place is one line, with exit code 2."""
        if addresses is not None:
            (tmp_path / "addresses.json").write_text(addresses)
        said = Said(capsys, "status", str(tmp_path))
        assert said.code == 2
        assert words in said.err

    def test_no_directory_and_no_address(self, capsys: pytest.CaptureFixture[str]) -> None:
        """One of them is needed."""
        said = Said(capsys, "status")
        assert (said.code, said.err) == (2, "orchestrator: status needs a run directory or --url\n")

    def test_an_address_of_another_kind(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Only HTTP is spoken."""
        assert Said(capsys, "status", "--url", "file:///etc/hosts").code == 2

    def test_nobody_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A service that does not answer is exit code 1, with the question that helps."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        said = Said(capsys, "status", "--url", f"http://127.0.0.1:{port}")
        assert said.code == 1
        assert "is the service running?" in said.err


def test_the_command_is_installed() -> None:
    """`orchestrator` is on the virtualenv's path and ends with the code that main returns."""
    done = command("check", "nowhere.toml")
    assert (done.returncode, done.stderr) == (2, "orchestrator: nowhere.toml: there is no such file\n")


def test_the_package_can_be_run_as_a_module() -> None:
    """`python -m orchestrator` is the same command."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "--version"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout.strip()) == (0, __version__)


@pytest.mark.parametrize("order", ["run", "eval"])
def test_a_command_that_runs_for_days_outlives_who_reads_what_it_says(order: str, tmp_path: Path) -> None:
    """The terminal is closed, or `tee` has ended: whatever is said then is left out, and the exit code is as ever."""
    reader, writer = os.pipe()
    os.close(reader)
    asked = [sys.executable, "-m", "orchestrator", order, str(tmp_path / "missing.toml")]
    ended = subprocess.run(asked, stdout=writer, stderr=writer, check=False)
    os.close(writer)
    assert ended.returncode == 2


def test_a_command_whose_output_nobody_reads_ends_quietly() -> None:
    """As in `orchestrator schema | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    asked = [sys.executable, "-m", "orchestrator", "schema"]
    ended = subprocess.run(asked, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_for_inference_servers_ends_quietly(
    tmp_path: Path, number: signal.Signals
) -> None:
    """128 + the signal's number, and no traceback."""
    config = tmp_path / "config.toml"
    config.write_text(
        f'run_dir = "{tmp_path}/run"\n'
        '[inference]\nbase_urls = ["http://127.0.0.1:9/v1"]\n'
        '[[train.env]]\nname = "reverse"\nid = "builtin::reverse"\n'
        '[trainer]\nbind = "tcp://127.0.0.1:0"\n[http]\nport = 0\n'
    )
    with subprocess.Popen(
        [COMMAND, "run", config], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        # The env is up, so that the start now waits for an inference server that never comes.
        for line in process.stdout:
            if '"env.ready"' in line:
                break
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 128 + number
    assert "Traceback" not in rest
    kept = (tmp_path / "run" / "logs" / "orchestrator.log").read_text().splitlines()
    assert "env.ready" in [json.loads(line)["event"] for line in kept], "a piped run has its log on disk too"
