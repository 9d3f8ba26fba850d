"""Run directories, made up, for what looks at them afterwards: a journal of steps, and rollouts of some of them."""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.archive import schema as archive_schema
from orchestrator.facts import StepRecord
from orchestrator.journal.directory import DATABASE, DIRECTORY
from orchestrator.journal.schema import create_tables, open_for_writing
from tests.support.archived import batch_of, opened, pending
from tests.support.step_records import step_record

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"><b>bold</b>"
"""What a rollout may say; a page must show it as it is."""


def write_run(run_dir: Path, steps: int = 12, *, seed: int = 0, ended: bool = True) -> Path:
    """A small run with rollouts, of one env called math; `ended`: its summary was written."""
    records = [step_record(step, envs=("math", "code"), seed=seed) for step in range(1, steps + 1)]
    write_journal(
        run_dir, records, evals=[{"env": "held", "step": 5, "version": 5, "avg@4": 0.5, "failures": 0}]
    )
    with opened(run_dir, groups_per_step=8) as archive:
        for step in range(1, steps + 1):
            math = pending(
                2 * step, (0.0, 1.0, 0.5), version=step - 1, text=f"question of step {step} {HOSTILE}"
            )
            code = pending(2 * step + 1, (0.25, 0.75), env="code", version=step - 1)
            for group in (math, code):
                archive.scored(group, "queued", 12.0)
            archive.batch_formed(batch_of(step, math, code))
        archive.scored(pending(101, (0.0, 0.0)), "equal_rewards", 15.0)
    if ended:
        tasks = {
            "num_tasks": 1000,
            "tried": 60,
            "solve_rates": [30, 5, 0, 5, 0, 5, 5, 0, 0, 10],
            "strategy": "difficulty",
            "pools": {"unseen": 940, "easy": 10, "medium": 15, "hard": 35, "retired": 0, "open": 0},
            "hardest": [
                {
                    "task": 77,
                    "groups": 9,
                    "rollouts": 36,
                    "reward": 0.01,
                    "solve_rate": 0.02,
                    "equal_share": 0.75,
                    "version": 3,
                }
            ],
        }
        summary: dict[str, Any] = {
            "end": "max_steps reached",
            "steps": steps,
            "version": steps,
            "finished_at": "then",
        }
        summary["envs"] = {"math": {"tasks": tasks}, "code": {"tasks": {"num_tasks": "nonsense"}}}
        (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return run_dir


def write_journal(
    run_dir: Path, records: Iterable[StepRecord], *, evals: Sequence[dict[str, Any]] = ()
) -> None:
    """A journal that has the records of steps, with what the trainer reported."""
    (run_dir / DIRECTORY).mkdir(parents=True)
    with closing(open_for_writing(run_dir / DIRECTORY / DATABASE)) as connection:
        create_tables(connection)
        add_steps(connection, records)
        connection.executemany(
            "INSERT INTO evals (env, step, version, at, data) VALUES (?, ?, ?, 0, ?)",
            [(told["env"], told["step"], told["version"], json.dumps(told)) for told in evals],
        )


def add_steps(connection: sqlite3.Connection, records: Iterable[StepRecord]) -> None:
    """Steps that are recorded meanwhile."""
    connection.execute("BEGIN")
    for record in records:
        connection.execute(
            "INSERT INTO batches (step, version, groups, sequences, tokens, reward, envs, formed_at, acknowledged_at, kept,"
            " facts) VALUES (?, ?, ?, ?, ?, ?, '{}', ?, ?, 0, ?)",
            (
                record.step,
                record.version,
                record.groups,
                record.sequences,
                record.tokens,
                record.reward,
                record.at,
                record.at,
                msgspec.json.encode(record).decode(),
            ),
        )
        connection.execute(
            "INSERT INTO reports (step, data) VALUES (?, ?)", (record.step, json.dumps(record.trainer))
        )
    connection.execute("COMMIT")


def write_many_rollouts(run_dir: Path, *, steps: int, groups_per_step: int, group_size: int) -> None:
    """An archive of very many groups, most of them without their conversations, as a long run has it."""
    rewards = json.dumps([0.5] * group_size)
    lengths = json.dumps([100] * group_size)
    with closing(archive_schema.open_for_writing(run_dir / archive_schema.FILE, "one")) as connection:
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT INTO groups (id, env, split, task_index, epoch, position, step, version, version_end, outcome, rollouts,"
            " rewards, lengths, min_reward, max_reward, mean_reward, tokens, truncated, started_at, finished_at)"
            " VALUES (?, ?, 'train', ?, 0, ?, ?, ?, ?, 'trained', ?, ?, ?, 0.5, 0.5, 0.5, 800, 0, 0, 1)",
            (
                (f"math/train/{n}", "math", n % 5000, n, step, step - 1, step, group_size, rewards, lengths)
                for step in range(1, steps + 1)
                for n in range((step - 1) * groups_per_step, step * groups_per_step)
            ),
        )
        connection.execute("COMMIT")
