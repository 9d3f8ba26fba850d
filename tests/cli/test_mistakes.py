"""Typical mistakes of the first day: each gives one clear message and the right exit code; nothing is started or lost.

A table: what stands in the directory, what is typed, what must be said, and the exit code. To add one, add a row.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog

from orchestrator.cli import main

COMMAND = Path(sys.executable).parent / "orchestrator"

GOOD = """
run_dir = "runs/first"
[local]
[batch]
size = 16
[train]
group_size = 8
[[train.env]]
name = "math"
id = "builtin::reverse"
ratio = 0.5
[[train.env]]
name = "code"
id = "builtin::agree"
ratio = 0.5
[trainer]
bind = "tcp://127.0.0.1:0"
[http]
port = 0
"""

SPELLING = """
from envs import Environment


class Spelling(Environment):
    def __init__(self, words: list[str]) -> None:
        self.words = words

    def tasks(self, split):
        return [{"word": word} for word in self.words]

    async def rollout(self, task, model):
        return model.rollout(reward=0.0)


NUMBER = 3
"""

RAISING = """
from orchestrator.mix import EnvMixStrategy

raise RuntimeError("no licence")
"""


@dataclass(frozen=True)
class Mistake:
    """What is typed in a directory with a configuration and these files, and what comes of it."""

    typed: str
    says: str
    code: int = 2
    swap: tuple[str, str] = ("", "")
    """A piece of the good configuration, and what stands in its place."""
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


CHECK = "check config.toml"
RUN = "run config.toml"
MISTAKES: dict[str, Mistake] = {
    # --- the file
    "no such file": Mistake("run confg.toml", "confg.toml: there is no such file"),
    "a directory for a file": Mistake("run .", "cannot be read"),
    "not TOML": Mistake(RUN, "not valid TOML", swap=("[batch]", "[batch")),
    "an unknown key": Mistake(RUN, 'batch.sise: unknown key; did you mean "size"?', swap=("size = 16", "sise = 16")),
    "an unknown table": Mistake(RUN, 'batches: unknown key; did you mean "batch"?', swap=("[batch]", "[batches]")),
    "text for a number": Mistake(RUN, "batch.size: input should be a valid integer", swap=("16", '"many"')),
    "true for a number": Mistake(RUN, "batch.size: input should be a number", swap=("size = 16", "size = true")),
    "a share above one": Mistake(
        RUN, "train.env[0].min_batch_allocation: input should be less than or equal to 1",
        swap=("ratio = 0.5", "ratio = 0.5\nmin_batch_allocation = 25"),
    ),
    "one bracket": Mistake(RUN, "write [[train.env]], with two brackets", swap=(GOOD[GOOD.index("[[") :], '[train.env]\nid = "reverse"\n')),
    "no environment": Mistake(RUN, "train.env: is required", swap=(GOOD[GOOD.index("[[") :], "")),
    "two of one name": Mistake(RUN, '"math" is already the name of train.env[0]', swap=('"code"', '"math"')),
    "one ratio missing": Mistake(RUN, "either every env sets a ratio or none does", swap=("ratio = 0.5\n[trainer]", "[trainer]")),
    "a group beyond the batch": Mistake(RUN, "a group of 32 does not fit into a batch of 16", swap=("group_size = 8", "group_size = 32")),
    # --- servers and addresses
    "no inference server": Mistake(RUN, "no inference server is named; set base_urls", swap=("[local]", "")),
    "a server without a scheme": Mistake(RUN, "is not an http:// or https:// address", swap=("[local]", '[inference]\nbase_urls = ["h:8000/v1"]')),
    "a server without /v1": Mistake(RUN, 'did you mean "http://h:8000/v1"?', swap=("[local]", '[inference]\nbase_urls = ["http://h:8000"]')),
    "a trainer's address without tcp://": Mistake(RUN, 'did you mean "tcp://127.0.0.1:0"?', swap=('"tcp://127.0.0.1:0"', '"127.0.0.1:0"')),
    "a trainer link for everybody": Mistake(RUN, "is reachable from other machines; set trainer.secret_key_file", swap=("127.0.0.1:0", "0.0.0.0:5555")),
    "ranks that cannot share a batch": Mistake(
        RUN, "a batch of 16 cannot be shared equally by 3 ranks", swap=("[local]", "[local]\ntrainer = false"), variables={"ORCHESTRATOR__TRAINER__WORLD_SIZE": "3"}
    ),
    "a token that is not there": Mistake(RUN, "the environment variable HTTP_TOKEN is not set", swap=("port = 0", 'port = 0\ntoken_env = "HTTP_TOKEN"')),
    "a key file that is not there": Mistake(RUN, "trainer: ", swap=("[http]", 'secret_key_file = "trainer.secret"\n[http]')),
    "HTTP for everybody": Mistake(RUN, "name the variable with a token in http.token_env", swap=("port = 0", 'host = "0.0.0.0"')),
    # --- names of parts
    "a built-in that is not there": Mistake(CHECK, 'there is no built-in environment "revers"; did you mean "reverse"?', swap=("reverse", "revers")),
    "a loader that is not there": Mistake(CHECK, 'did you mean "reasoning_gym"?', swap=("builtin::reverse", "reasoning-gym::x")),
    "an interpreter that is not there": Mistake(CHECK, 'python = "/opt/no/python" is not an interpreter', swap=('"math"', '"math"\npython = "/opt/no/python"')),
    "a strategy that is not there": Mistake(RUN, 'no mix strategy is named "flwo"', swap=("[batch]", '[mix]\nstrategy = "flwo"\n[batch]')),
    "an option that the strategy lacks": Mistake(RUN, 'has no option "gian"; it has: gain', swap=("[batch]", "[mix]\noptions = { gian = 1 }\n[batch]")),
    "a strategy's module that is not there": Mistake(RUN, "there is no module my_mix", swap=("[batch]", '[mix]\nstrategy = "my_mix:Mine"\n[batch]')),
    "a strategy's module that raises": Mistake(
        RUN, "raising_mix.py, line 4", swap=("[batch]", '[mix]\nstrategy = "raising_mix:Mine"\n[batch]'), files={"raising_mix.py": RAISING}
    ),
    "an advantage that is not there": Mistake(RUN, 'dispatch.advantage: "gpro" is not one of grpo', swap=("[batch]", '[dispatch]\nadvantage = "gpro"\n[batch]')),
    "a weight update that is not there": Mistake(RUN, 'inference.weight_update: "nccl" is not one of', swap=("[batch]", '[inference]\nweight_update = "nccl"\n[batch]')),
    "a misspelt sampling parameter": Mistake(RUN, 'did you mean "temperature"?', swap=("group_size = 8", "group_size = 8\nsampling = { temprature = 1 }")),
    "a tracker that is not there": Mistake(RUN, 'track.use: "wnadb" is not one of tensorboard, wandb', swap=("[batch]", '[track]\nuse = ["wnadb"]\n[batch]')),
    "a tracker whose library is missing": Mistake(CHECK, 'pip install "rollout-orchestrator[wandb]"', swap=("[batch]", '[track]\nuse = ["wandb"]\n[batch]')),
    "a tracker's module that raises": Mistake(
        RUN, "raising_tracker.py, line 4", swap=("[batch]", '[track]\nuse = ["raising_tracker:Mine"]\n[batch]'), files={"raising_tracker.py": RAISING}
    ),
    "a tracker twice": Mistake(RUN, 'track.use: "tensorboard" is there more than once', swap=("[batch]", '[track]\nuse = ["tensorboard", "tensorboard"]\n[batch]')),
    "options of a tracker that is not used": Mistake(
        RUN, 'track.options."m:Trackr": track.use does not name it; did you mean "m:Tracker"?',
        swap=("[batch]", '[track]\nuse = ["m:Tracker"]\noptions = { "m:Trackr" = {} }\n[batch]'),
    ),
    "options of wandb where they do not belong": Mistake(
        RUN, "its settings belong into [track.wandb]", swap=("[batch]", '[track]\nuse = ["wandb"]\noptions = { wandb = { project = "x" } }\n[batch]')
    ),
    "a setting that wandb lacks here": Mistake(RUN, 'track.wandb.projct: unknown key; did you mean "project"?', swap=("[batch]", '[track.wandb]\nprojct = "x"\n[batch]')),
    # --- the command line
    "an unknown command": Mistake("rum config.toml", "invalid choice: 'rum'"),
    "an override without a value": Mistake(f"{RUN} --batch.size", "--batch.size: has no value"),
    "an override of a misspelt env": Mistake(f"{RUN} --train.env.maths.ratio 1", 'there is no item "maths"; did you mean "math"?'),
    "an override of the wrong type": Mistake(f"{RUN} --batch.size many", "(set by --batch.size)"),
    "a misspelt variable": Mistake(RUN, 'no such setting "btch"; did you mean "batch"?', variables={"ORCHESTRATOR__BTCH__SIZE": "1"}),
    "a variable of the wrong type": Mistake(RUN, "(set by ORCHESTRATOR__BATCH__SIZE)", variables={"ORCHESTRATOR__BATCH__SIZE": "x"}),
    "nothing to evaluate": Mistake("eval config.toml", "there is nothing to evaluate; add an [[eval.env]]"),
    "a simulation of another env": Mistake("simulate config.toml --latency maths=5", 'no train env is named "maths"; there are: math, code'),
    "the status of nothing": Mistake("status runs/other", "there is no such file; is runs/other the directory of a run?"),
    "the status of nobody": Mistake("status --url http://127.0.0.1:9", "is the service running?", code=1),
    "init where something is": Mistake("init .", "config.toml would be overwritten"),
    # --- environments
    "an environment's module that is not there": Mistake("env try spelin:Spelling", "there is no module spelin"),
    "a misspelt class": Mistake("env try my_spelling:Speling", 'did you mean "Spelling"?', files={"my_spelling.py": SPELLING}),
    "not a class": Mistake("env try my_spelling:NUMBER", "is a int, not an Environment class", files={"my_spelling.py": SPELLING}),
    "a misspelt argument": Mistake("env try my_spelling:Spelling --args word=cat", "it takes words", files={"my_spelling.py": SPELLING}),
    "arguments that are no arguments": Mistake("env try reverse --args cat", "'cat' is neither key=value nor a JSON object"),
    "a server that is not up": Mistake("env try reverse --base-url http://127.0.0.1:9/v1", "is the inference server up?"),
    "serving everybody": Mistake("env serve reverse --bind tcp://0.0.0.0:7000", "orchestrator env keygen DIR"),
}  # fmt: skip

FAULTY = """
from envs import Environment


class Base(Environment):
    def tasks(self, split):
        return [{"word": "cat"}]

    async def rollout(self, task, model):
        return model.rollout(reward=task["letters"])


class Synchronous(Base):
    def rollout(self, task, model):
        return model.rollout(reward=0.0)


class Unmade(Base):
    def __init__(self):
        raise KeyError("DATA_DIR")
"""
RAISES = 'import json\n\nraise RuntimeError("no licence")\n'
MINE = {"faulty.py": FAULTY, "raises.py": RAISES}
OF_ENVIRONMENTS: dict[str, Mistake] = {
    "an import that raises": Mistake("env try raises:Mine", 'importing environment "raises:Mine" raised RuntimeError: no licence, at raises.py:3', code=3, files=MINE),
    "a constructor that raises": Mistake("env try faulty:Unmade", "raised KeyError: 'DATA_DIR', at faulty.py:20 in __init__", code=3, files=MINE),
    "a rollout that raises": Mistake("env try faulty:Base -n 1", "KeyError: 'letters', at faulty.py:10 in rollout", code=1, files=MINE),
    "a rollout without async": Mistake("env try faulty:Synchronous", 'write "async def rollout"', files=MINE),
    "a run whose environment raises": Mistake(RUN, "raised RuntimeError: no licence, at raises.py:3", code=3, swap=("builtin::reverse", "raises:Mine"), files=MINE),
    "a check of it": Mistake(f"{CHECK} --deep", "raised RuntimeError: no licence, at raises.py:3", swap=("builtin::reverse", "raises:Mine"), files=MINE),
}  # fmt: skip
"""Found by running the environment's own code, so that each is a process of its own."""

BOTH_PORTS = """
[local]
[[train.env]]
id = "reverse"
[trainer]
bind = "tcp://127.0.0.1:PORT"
[http]
port = PORT
"""


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command sets logging up for its process, which here is the one of all tests."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _no_settings_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("ORCHESTRATOR__"):
            monkeypatch.delenv(name)


def prepare(mistake: Mistake, directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Write the directory and go there; returns all that it holds."""
    old, new = mistake.swap
    assert old in GOOD
    (directory / "config.toml").write_text(GOOD.replace(old, new, 1) if old else GOOD)
    for name, text in mistake.files.items():
        (directory / name).write_text(text)
    for name, value in mistake.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(directory)
    return contents(directory)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file, but for what the interpreter writes by itself."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gives_one_clear_message(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback, no half-printed output, and the directory is as it was."""
    before = prepare(mistake, tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        code = main(mistake.typed.split())
    except SystemExit as end:  # what argparse does at a word that it does not know
        code = int(end.code or 0)
    finally:
        for name in mistake.files:
            sys.modules.pop(Path(name).stem, None)
    said = capsys.readouterr()
    assert mistake.says in said.err
    assert code == mistake.code
    assert "Traceback" not in said.err + said.out
    assert said.out == ""
    assert said.err.startswith(("orchestrator: ", "error: ", "usage: "))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("mistake", OF_ENVIRONMENTS.values(), ids=OF_ENVIRONMENTS)
def test_a_mistake_in_an_environment_is_told_with_its_line(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback, where there is one, has frames of the author's code alone."""
    before = prepare(mistake, tmp_path, monkeypatch)
    done = subprocess.run(
        [COMMAND, *mistake.typed.split()],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "500"},
    )
    said = done.stdout + done.stderr
    assert mistake.says in said
    assert done.returncode == mistake.code, said
    frames = re.findall(r'^ *File "([^"]+)"', said, re.MULTILINE)
    assert {Path(frame).parent for frame in frames} <= {tmp_path}
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before


def test_there_are_enough_of_them() -> None:
    """A table that shrinks would pass too."""
    assert len(MISTAKES) + len(OF_ENVIRONMENTS) >= 35


def test_ports_that_are_taken_are_told_with_the_setting(tmp_path: Path) -> None:
    """Both at once, by `check --deep`, before a run would meet them."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        (tmp_path / "config.toml").write_text(BOTH_PORTS.replace("PORT", port))
        done = subprocess.run(
            [COMMAND, "check", "config.toml", "--deep"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert f"trainer.bind: cannot listen on 127.0.0.1:{port}: something listens there already" in done.stderr
    assert f"http.port: cannot listen on 127.0.0.1:{port}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
