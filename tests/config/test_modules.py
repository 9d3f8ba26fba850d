"""Modules that a configuration names are found in the working directory and beside the file, whatever they are for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from envs.importing import module_path
from orchestrator.config import load_config

COMMAND = Path(sys.executable).parent / "orchestrator"

MODULE = '''
import numpy as np

from envs import Environment, Model, Rollout, Task
from orchestrator.mix import EnvMixStrategy


class Echo(Environment):
    """One task."""

    def tasks(self, split: str) -> list[Task]:
        return [{"text": "abc"}]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        await model.chat([{"role": "user", "content": task["text"]}])
        return model.rollout(reward=1.0)


class First(EnvMixStrategy):
    """Always the first that may be picked."""

    def pick(self, eligible=None):
        return next(name for name in self.env_names if eligible is None or name in eligible)


def halved(rewards):
    return np.asarray(rewards) / 2


async def update(request):
    """Weights that nobody has to load."""
'''

CONFIG = """
run_dir = "RUN_DIR"
max_steps = 2
[local]
[batch]
size = 4
[train]
group_size = 2
sampling = { max_tokens = 2 }
[[train.env]]
name = "echo"
id = "beside_the_file:Echo"
[mix]
strategy = "beside_the_file:First"
[dispatch]
advantage = "beside_the_file:halved"
keep_equal_rewards = true
[inference]
weight_update = "beside_the_file:update"
[trainer]
bind = "tcp://127.0.0.1:0"
[http]
port = 0
"""


@pytest.fixture
def project(tmp_path: Path) -> tuple[Path, Path]:
    """A configuration with a module beside it, and an empty directory to start from."""
    home, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "beside_the_file.py").write_text(MODULE)
    (home / "config.toml").write_text(CONFIG.replace("RUN_DIR", str(tmp_path / "run")))
    return home, elsewhere


def orchestrator(where: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *words], cwd=where, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("start", ["home", "elsewhere"])
def test_check_finds_them_wherever_it_is_started(project: tuple[Path, Path], start: str) -> None:
    """The strategy, the advantage and the weight update are imported from beside the file."""
    home, elsewhere = project
    where, path = (home, Path("config.toml")) if start == "home" else (elsewhere, home / "config.toml")
    done = orchestrator(where, "check", path)
    assert done.returncode == 0, done.stderr
    assert orchestrator(where, "simulate", path, "--tasks", "echo=1", "--steps", "2").returncode == 0


def test_a_run_from_elsewhere_finds_them_in_the_env_servers_too(
    project: tuple[Path, Path], tmp_path: Path
) -> None:
    """The environment is loaded by a process of its own, which looks where the service looks."""
    home, elsewhere = project
    done = orchestrator(elsewhere, "run", Path("..") / "project" / "config.toml")
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert sorted(path.name for path in elsewhere.iterdir()) == []
    assert sorted(path.name for path in home.iterdir() if path.name != "__pycache__") == [
        "beside_the_file.py",
        "config.toml",
    ]


def test_a_module_that_is_nowhere_says_where_it_was_looked_for(project: tuple[Path, Path]) -> None:
    """Both places are in the message."""
    home, elsewhere = project
    (home / "beside_the_file.py").unlink()
    done = orchestrator(elsewhere, "check", home / "config.toml")
    assert done.returncode == 2
    assert f"nor in {elsewhere} or {home}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_working_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the file's own directory; a directory that is both is looked at once."""
    monkeypatch.chdir(tmp_path)
    assert module_path(tmp_path / "configs") == [str(tmp_path), str(tmp_path / "configs")]
    assert module_path(tmp_path) == [str(tmp_path)]


def test_a_configuration_knows_where_its_file_is(project: tuple[Path, Path]) -> None:
    """As an absolute path, so that it survives a change of the working directory."""
    home, _ = project
    assert load_config(home / "config.toml").directory == home.resolve()
