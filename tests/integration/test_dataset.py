"""Environments of a file as a user meets them: the command, a configuration, rows beside it, an exit code."""

import json
from pathlib import Path

import pytest

from tests.integration.env_servers import ROOT
from tests.integration.service_fixture import run_command

CONFIG = """
run_dir = "{run_dir}"
max_steps = 2

[local]

[batch]
size = 8

[train]
group_size = 4
sampling = {{ max_tokens = 4 }}

[[train.env]]
name = "matched"
id = "dataset::rows.jsonl"
args = {{ prompt = "{{question}}", scorer = {{ name = "regex", pattern = "[a-m]" }} }}
workers = 2

[[train.env]]
name = "coded"
id = "dataset::rows.jsonl"
args = {{ prompt = "{{question}}", scorer = {{ name = "unit_tests", confined = {confined} }} }}

[dispatch]
max_inflight = 16
keep_equal_rewards = true

[trainer]
bind = "tcp://127.0.0.1:0"

[http]
port = 0
"""


def written(folder: Path, *lines: str) -> Path:
    """A configuration, and rows beside it."""
    confined = str(Path("/sys/kernel").exists()).lower()
    config = folder / "config.toml"
    config.write_text(CONFIG.format(run_dir=folder / "run", confined=confined), encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return config


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_shipped_configuration_learns(tmp_path: Path) -> None:
    """From chance to nearly everything, on rows that were trained on and on those that were held back."""
    run_dir = tmp_path / "run"
    command = await run_command(
        "run",
        ROOT / "configs" / "dataset.toml",
        "--run_dir",
        run_dir,
        logs=tmp_path / "logs",
    )
    assert command.process.returncode == 0, command.errors()[-3000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["first_reward"] < 0.2
    assert summary["last_reward"] > 0.8
    assert summary["failures"] == {}
    assert {name: env["num_tasks"] for name, env in summary["envs"].items()} == {
        "last_digit": 180,
        "first_letter": 210,
    }
    evaluations = [json.loads(line) for line in (run_dir / "evals.jsonl").read_text().splitlines()]
    assert evaluations[0]["avg@1"] < 0.2
    assert evaluations[-1]["avg@1"] > 0.8


@pytest.mark.timeout(600)
async def test_scorers_that_start_processes_work_in_env_servers_and_leave_none_behind(tmp_path: Path) -> None:
    """Two servers beside each other; the rows are found beside the configuration."""
    rows = [json.dumps({"question": f"say {number}", "tests": ["assert True"]}) for number in range(20)]
    command = await run_command("run", written(tmp_path, *rows), logs=tmp_path / "logs")
    assert command.process.returncode == 0, command.errors()[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["sequences"], summary["failures"]) == (16, {})


@pytest.mark.timeout(600)
async def test_a_run_with_bad_rows_does_not_start_and_names_them(tmp_path: Path) -> None:
    """By their lines, in the error that ends it."""
    good = '{"question": "x", "tests": ["assert True"]}'
    path = written(tmp_path, good, '{"qestion": "y", "tests": ["assert True"]}', good, "{")
    command = await run_command("run", path, logs=tmp_path / "logs")
    assert command.process.returncode == 3
    said = command.errors().splitlines()
    (error,) = [line for line in said if line.startswith("orchestrator: env ")]
    assert (
        '2 rows cannot be used: line 2: no column "question" (did you mean "qestion"?); line 4: not JSON'
        in error
    )
