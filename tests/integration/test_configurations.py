"""Configurations and strategies as a user meets them: the command, real processes, an exit code."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.env_servers import ROOT
from tests.integration.service_fixture import Command, run_command

STRATEGY = """
from orchestrator.mix import EnvMixStrategy


class Founding(EnvMixStrategy):
    def pick(self):
        return self.rng.choice(self.env_names)


class Tired(EnvMixStrategy):
    picks = 0

    def pick(self, eligible=None):
        self.picks += 1
        if self.picks > 9:
            raise RuntimeError("no more picks")
        return next(name for name in self.env_names if eligible is None or name in eligible)
"""


async def run(tmp_path: Path, config: str, *overrides: str, code: int = 0) -> tuple[Command, dict[str, Any]]:
    """Run a shipped configuration to its end; returns what it said and its summary."""
    run_dir = tmp_path / "run"
    path = ROOT / "configs" / config
    command = await run_command("run", path, "--run_dir", run_dir, *overrides, logs=tmp_path / "logs")
    assert command.process.returncode == code, command.errors()[-3000:]
    summary = run_dir / "summary.json"
    return command, json.loads(summary.read_text()) if summary.exists() else {}


@pytest.mark.timeout(600)
async def test_a_slow_sandbox_runs_beside_fast_envs(tmp_path: Path) -> None:
    """Three domains, one with a limit on what is in flight and on starts per minute; all are in the batches."""
    _, summary = await run(tmp_path, "slow_sandbox.toml", "--max_steps", "10")
    assert summary["sequences"] == 10 * 64
    assert set(summary["envs"]) == {"words", "numbers", "sandbox"}
    assert summary["envs"]["sandbox"]["actual_share"] > 0


@pytest.mark.timeout(600)
async def test_minimums_hold_with_groups_of_different_sizes(tmp_path: Path) -> None:
    """Half of all from one env and a tenth from another, in exact batches of groups of 2, 8 and 4."""
    _, summary = await run(tmp_path, "minimums.toml", "--max_steps", "6")
    assert summary["sequences"] == 6 * 64
    assert summary["envs"]["words"]["actual_share"] >= 0.5
    assert summary["envs"]["agree"]["actual_share"] >= 7 / 64


@pytest.mark.timeout(600)
async def test_an_env_of_ratio_zero_beside_one_at_its_limit_is_no_error(tmp_path: Path) -> None:
    """While the only env of the mix is at its limit there is nothing to pick, and the run goes on."""
    overrides = [
        '--train.env=[{ name = "words", id = "reverse", ratio = 1, max_inflight = 8 }, { id = "agree", ratio = 0 }]',
        "--max_steps=2",
    ]
    _, summary = await run(tmp_path, "quickstart.toml", *overrides)
    assert summary["sequences"] == 2 * 128


@pytest.mark.timeout(600)
async def test_a_strategy_of_the_founding_signature_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pick(self)` is enough: it is asked again until it names an env that may be picked."""
    (tmp_path / "own_strategy.py").write_text(STRATEGY)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    _, summary = await run(
        tmp_path, "quickstart.toml", "--mix.strategy=own_strategy:Founding", "--max_steps=2"
    )
    assert summary["steps"] == 2


@pytest.mark.timeout(600)
async def test_a_strategy_that_fails_in_the_middle_ends_the_run_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 and one sentence with the strategy, the file and the line, no traceback."""
    (tmp_path / "own_strategy.py").write_text(STRATEGY)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    command, _ = await run(tmp_path, "quickstart.toml", "--mix.strategy=own_strategy:Tired", code=1)
    said = command.errors()
    assert (
        'orchestrator: mix strategy "own_strategy:Tired" failed in pick: RuntimeError: no more picks' in said
    )
    assert f"({tmp_path / 'own_strategy.py'}, line 16)" in said
    assert "Traceback" not in said


CURRICULUM = """
from orchestrator.curriculum import CurriculumStrategy


class Tired(CurriculumStrategy):
    picks = 0

    def pick(self, chance):
        self.picks += 1
        if self.picks > 30:
            raise RuntimeError("no more picks")
        return chance.below(self.num_tasks)
"""


@pytest.mark.timeout(600)
async def test_a_curriculum_that_fails_in_the_middle_ends_the_run_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 and one sentence; what was learned is there, and another curriculum goes on with it."""
    (tmp_path / "own_curriculum.py").write_text(CURRICULUM)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    command, _ = await run(tmp_path, "quickstart.toml", "--curriculum.strategy=own_curriculum:Tired", code=1)
    said = command.errors()
    fault = "failed in pick: RuntimeError: no more picks"
    assert f'orchestrator: curriculum "own_curriculum:Tired" {fault}' in said
    assert f"({tmp_path / 'own_curriculum.py'}, line 11)" in said
    assert "Traceback" not in said
    command, summary = await run(
        tmp_path, "quickstart.toml", "--curriculum.strategy=frontier", "--max_steps=3"
    )
    notes = [event["note"] for event in command.events("run.changed")]
    assert len(notes) == 3
    assert all("its curriculum was own_curriculum:Tired" in note for note in notes)
    assert summary["envs"]["reverse"]["tasks"]["strategy"] == "frontier"
    told = await run_command("tasks", tmp_path / "run", "--json", logs=tmp_path / "logs")
    found = json.loads(told.stdout.read_text())
    assert {name: env["strategy"] for name, env in found.items()} == dict.fromkeys(found, "frontier")
    assert sum(env["groups"] for env in found.values()) >= 3 * 128 // 8


DOMAINS = """
seed = 1
max_steps = 4

[local]

[domains.math]
rollout = "tests.adapters.test_domains:solve"
dataset = "tests.adapters.test_domains:problems"

[mix.domains]
math = 0.75
reverse = 0.25

[batch]
size = 32

[train]
group_size = 4

[dispatch]
keep_equal_rewards = true

[[train.env]]
name = "gsm"
id = "math::gsm"
ratio = 2

[[train.env]]
name = "aime"
id = ["math::aime@2024", "math::aime@2025"]
ratio = 1

[[train.env]]
name = "reverse"
id = "builtin::reverse"

[http]
port = 0
"""


@pytest.mark.timeout(600)
async def test_domains_get_their_share_of_the_mix(tmp_path: Path) -> None:
    """A ratio is a share within its domain, and every env is in the batches."""
    path = tmp_path / "domains.toml"
    path.write_text(DOMAINS, encoding="utf-8")
    run_dir = tmp_path / "run"
    command = await run_command("run", path, "--run_dir", run_dir, logs=tmp_path / "logs")
    assert command.process.returncode == 0, command.errors()[-3000:]
    envs = json.loads((run_dir / "summary.json").read_text())["envs"]
    targets = {name: env["target_share"] for name, env in envs.items()}
    assert targets == pytest.approx({"gsm": 0.5, "aime": 0.25, "reverse": 0.25})
    assert all(env["sequences"] for env in envs.values())
    assert {name: env["domain"] for name, env in envs.items()} == {
        "gsm": "math",
        "aime": "math",
        "reverse": "reverse",
    }
