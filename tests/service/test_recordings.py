"""What a run has left for a simulation: whole groups, what they had of equal rewards, and the sequences of each rollout."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from orchestrator.cli import main
from orchestrator.curriculum import TaskOutcome
from orchestrator.groups.group import Batch, Group
from orchestrator.service.recordings import read_recording
from orchestrator.simulate.behaviour import assumed
from orchestrator.simulate.recorded import lay_recording
from tests.support.archived import opened, pending, scored_group
from tests.support.journal_opening import open_journal
from tests.support.step_records import step_record


async def recorded(run_dir: Path, groups: Sequence[Group], *, equal: int = 0) -> None:
    """A run of a batch for each group; `equal` others had equal rewards."""
    async with open_journal(run_dir, keep_batches=len(groups)) as journal:
        for step, group in enumerate(groups, start=1):
            outcome = TaskOutcome(group.task.index, step, 0.5, group.rollouts, equal=False)
            journal.record_group(group, outcome)
            record = step_record(step, envs=("math",))
            record.envs["math"].times = {"completed": {0: 10}}
            journal.record_batch(Batch(step, step - 1, (group,)), lambda: None, record=record)
        for position in range(equal):
            outcome = TaskOutcome(position, 1, 0.5, 2, equal=True)
            journal.record_task("math", 100 + position, "equal_rewards", outcome)
        await journal.flush()


async def test_only_whole_groups_that_were_scored_say_how_groups_go(tmp_path: Path) -> None:
    """Neither what came back of a group that failed, nor one that lives with fewer rollouts."""
    whole = [pending(position, (0.0, 1.0)) for position in range(2)]
    await recorded(tmp_path, [scored_group(group) for group in whole])
    with opened(tmp_path) as archive:
        for group in whole:
            archive.scored(group, "queued", 12.0)
        archive.scored(pending(2, (0.5, 0.5)), "equal_rewards", 12.0)
        archive.scored(pending(3, (0.25,)), "queued", 12.0)
        archive.scored(pending(4, (0.75, 0.75)), "task_mismatch", 12.0)
        archive.dropped(pending(5, (0.75, 0.8)), "raised", 12.0)
    found = read_recording(tmp_path)
    rewards = sorted([reward for reward, _ in group] for group in found.groups["math"])
    assert rewards == [[0.0, 1.0], [0.0, 1.0], [0.5, 0.5]]
    assert found.equal == {}


async def test_without_an_archive_equal_rewards_come_from_the_statistics_of_tasks(tmp_path: Path) -> None:
    """The journal has only groups that are trained on; those that were filtered are counted there all the same."""
    await recorded(tmp_path, [scored_group(pending(position, (0.0, 1.0))) for position in range(4)], equal=12)
    around = assumed(["math"])
    lay_recording(read_recording(tmp_path), around)
    env, rng = around.envs["math"], random.Random(1)
    assert env.values["equal_rewards"] == pytest.approx(0.75)
    drawn = [{reward for reward, _ in env.group(rng, 2)} for _ in range(2000)]
    assert sum(len(rewards) == 1 for rewards in drawn) / 2000 == pytest.approx(0.75, abs=0.04)


async def test_sequences_are_counted_for_each_rollout(tmp_path: Path) -> None:
    """Not shared out evenly over its group."""
    groups = []
    for position in range(2):
        group = scored_group(pending(position, (0.0, 0.5, 1.0, 1.0)))
        facts = group.facts.copy()
        facts["rollout"] = np.array([0, 0, 0, 1])
        groups.append(replace(group, facts=facts, rollouts=2))
    await recorded(tmp_path, groups)
    assert sorted(read_recording(tmp_path).sequences["math"]) == [1.0, 1.0, 3.0, 3.0]


async def test_groups_of_another_size_than_was_recorded_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are made of recorded ones, so that how many have equal rewards is a guess."""
    await recorded(tmp_path, [scored_group(pending(position, (0.0, 1.0))) for position in range(4)])
    config = tmp_path / "config.toml"
    config.write_text(
        '[local]\n[batch]\nsize = 8\n[train]\ngroup_size = 4\n[[train.env]]\nname = "math"\nid = "reverse"\nratio = 1.0\n',
        encoding="utf-8",
    )
    words = ["simulate", str(config), "--from", str(tmp_path), "--steps", "2", "--seeds", "1"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert 'note: env "math": groups of 2 were recorded and groups of 4 are simulated' in said
    assert main([*words, "--sweep", "train.group_size=2"]) == 0
    assert "were recorded" not in capsys.readouterr().out
