"""The configuration of each family in configs/families, as a user runs it: offline, with the small local policy."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.config import load_config
from tests.adapters.venvs import ATROPOS, CLASSIC, INSPECT, OPENENV, REASONING_GYM, TEXTARENA, V1, Venv
from tests.integration.env_servers import ROOT
from tests.integration.service_fixture import run_command

FOLDER = ROOT / "configs" / "families"
VENVS = {
    "reasoning_gym": REASONING_GYM,
    "verifiers_classic": CLASSIC,
    "verifiers_v1": V1,
    "atropos": ATROPOS,
    "openenv": OPENENV,
    "textarena": TEXTARENA,
    "inspect": INSPECT,
}
STEPS = 3
OFFLINE = {"HF_HUB_OFFLINE": "1", "UV_OFFLINE": "1"}


def pythons(config: Path, venv: Venv) -> list[str]:
    """The interpreter of every environment, as words of the command line."""
    loaded = load_config(config)
    named = [("train", env.label) for env in loaded.train.env] + [
        ("eval", env.label) for env in loaded.eval.env
    ]
    return [word for table, name in named for word in (f"--{table}.env.{name}.python", str(venv.python))]


def test_every_family_has_one() -> None:
    """And nothing else is there that looks like one."""
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(VENVS)


@pytest.mark.parametrize("name", VENVS)
def test_it_can_be_checked_where_the_library_is_not(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`orchestrator check` reads the file, and starts nothing."""
    assert main(["check", str(FOLDER / f"{name}.toml")]) == 0
    assert load_config(FOLDER / f"{name}.toml").train.env[0].label in capsys.readouterr().out


@pytest.mark.adapters
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", VENVS)
async def test_it_runs_with_the_local_policy(name: str, tmp_path: Path) -> None:
    """From the first step to the last, with every environment in the batches and no rollout failed."""
    config, venv = FOLDER / f"{name}.toml", VENVS[name]
    if venv.missing():
        pytest.skip(venv.missing())
    words = ["--run_dir", str(tmp_path / "run"), "--max_steps", str(STEPS), *pythons(config, venv)]
    command = await run_command("run", config, *words, logs=tmp_path / "logs", **OFFLINE)
    assert command.process.returncode == 0, command.errors()[-3000:]
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == STEPS
    assert summary["failures"] == {}
    assert all(env["sequences"] for env in summary["envs"].values())
