"""The quickstart as a newcomer runs it: one command, real processes, a reward that climbs because something learns."""

import json
import signal
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.curriculum import Outcomes
from orchestrator.journal.learned import unpack
from tests.integration.env_servers import ROOT, until
from tests.integration.service_fixture import Command, run_command

QUICKSTART = ROOT / "configs" / "quickstart.toml"
STEPS = 60
"""As shipped: the reward of 0.8 comes with step 23 in one run and with step 35 in the next."""
ENVS = {"reverse": 0.4, "agree": 0.3, "lookup": 0.3}


async def run_quickstart(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    """Run it to its end; returns the summary."""
    run_dir = tmp_path / "run"
    command = await run_command("run", QUICKSTART, "--run_dir", run_dir, *overrides, logs=tmp_path / "logs")
    assert command.process.returncode == 0, command.errors()[-3000:]
    assert "max_steps reached" in command.stdout.read_text()
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


@pytest.mark.timeout(600)
async def test_the_quickstart_learns_and_says_so_in_its_summary(tmp_path: Path) -> None:
    """From near chance to at least 0.8, far above chance in every env, with everything that a summary should tell."""
    summary = await run_quickstart(tmp_path)
    assert (summary["end"], summary["steps"], summary["sequences"]) == (
        "max_steps reached",
        STEPS,
        STEPS * 128,
    )
    assert summary["first_reward"] < 0.2
    assert summary["last_reward"] >= 0.8
    assert summary["wall_time_s"] > 0
    assert summary["outcomes"]["completed"] >= STEPS * 128
    assert set(summary["outcomes"]) == {"completed", "failed", "timed_out", "cancelled", "lost"}
    assert summary["failures"] == {}
    assert set(summary["envs"]) == set(ENVS)
    for name, target in ENVS.items():
        facts = summary["envs"][name]
        assert facts["first_reward"] < 0.3
        # Chance pays 0.01. One run in ten knows all but one letter of an env for dozens of steps: a half of "lookup".
        assert facts["last_reward"] > 0.4
        assert facts["target_share"] == pytest.approx(target)
        assert facts["actual_share"] == pytest.approx(target, abs=0.05)
    assert summary["staleness"]["max"] <= 2


@pytest.mark.timeout(600)
async def test_without_learning_the_reward_does_not_climb(tmp_path: Path) -> None:
    """The same run with a learning rate of 0 stays where it began: the reward comes from learning alone."""
    summary = await run_quickstart(tmp_path, "--max_steps", "16", "--local.learning_rate", "0")
    assert summary["version"] >= 14
    assert summary["first_reward"] < 0.1
    assert summary["last_reward"] < 0.1


@pytest.mark.timeout(600)
async def test_a_killed_quickstart_leaves_no_process_behind_and_continues(tmp_path: Path) -> None:
    """After kill -9 everything that it started ends by itself; the same command again goes on with the same weights."""
    arguments = ("run", QUICKSTART, "--run_dir", tmp_path / "run", "--max_steps", "8")
    async with await Command.start(*arguments, logs=tmp_path / "logs") as command:
        # A version is logged before it is on disk; that a fourth came means that a fourth batch was served, and so that
        # everything before it was on disk.
        await command.wait_event("trainer.version_published", 4)
        # Three env servers, the policy server, the trainer, and the orchestrator itself, at least.
        assert len(command.processes()) >= 6
        command.send(signal.SIGKILL)
        await command.wait()
        await until(lambda: not command.processes())
    command = await run_command(*arguments, logs=tmp_path / "logs")
    assert command.process.returncode == 0, command.errors()[-3000:]
    [resumed] = command.events("run.resumed")
    assert resumed["version"] >= 3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["sequences"]) == (8, 8 * 128)
    assert "trainer.weights_missing" not in (tmp_path / "run" / "logs" / "trainer.log").read_text()


def learned_of(run_dir: Path, steps: int) -> dict[str, Outcomes]:
    """What groups said about their tasks until so many steps were formed."""
    with sqlite3.connect(run_dir / "journal" / "journal.sqlite3") as connection:
        # Two batches may be formed at once; the second has nothing of its own then.
        chosen = "step <= ? AND learned IS NOT NULL"
        blobs = connection.execute(f"SELECT learned FROM batches WHERE {chosen} ORDER BY step", (steps,))
        parts = [unpack(blob) for (blob,) in blobs]
    connection.close()
    envs = sorted({env for part in parts for env in part})
    return {env: np.concatenate([part[env] for part in parts if env in part]) for env in envs}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_run_is_set_back_to_an_earlier_step_and_trains_on_from_there(tmp_path: Path) -> None:
    """Its weights are loaded, later steps come anew, and all counts are those of one run of eight steps; what a
    curriculum learned up to the step is still known, and what it learned later is not."""
    chosen = ("--curriculum.strategy", "difficulty")
    arguments = ("run", QUICKSTART, "--run_dir", tmp_path / "run", "--max_steps", "8", *chosen)
    command = await run_command(*arguments, logs=tmp_path / "first")
    assert command.process.returncode == 0, command.errors()[-3000:]
    learned = learned_of(tmp_path / "run", 5)
    # The trainer of the quickstart keeps four checkpoints.
    command = await run_command(*arguments, "--rewind-to", "1", logs=tmp_path / "refused")
    assert command.process.returncode == 6
    assert "there are weights of steps 5, 6, 7, 8" in command.errors()
    command = await run_command(*arguments, "--rewind-to", "5", logs=tmp_path / "second")
    assert command.process.returncode == 0, command.errors()[-3000:]
    [rewound] = command.events("run.rewound")
    assert (rewound["last_step"], rewound["step"], rewound["version"], rewound["batches"]) == (8, 5, 5, 3)
    assert [event["step"] for event in command.events("batch.formed")] == [6, 7, 8]
    assert sum(map(len, learned.values())) >= 5 * 16
    assert all(map(np.array_equal, learned.values(), learned_of(tmp_path / "run", 5).values()))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["version"], summary["sequences"]) == (8, 8, 8 * 128)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 9))
