"""Samples of a step for trackers: the best and the worst of a group, of every env in turn."""

from pathlib import Path

import pytest

from orchestrator.service.samples import MOST_CHARS, read_samples
from tests.support.archived import batch_of, opened, pending


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A step with three groups of one env and one of another, and a group of a later step."""
    groups = [
        pending(0, (0.0, 0.5, 1.0)),
        pending(1, (0.25, 0.75)),
        pending(2, (0.0, 1.0)),
        pending(3, (0.5, 0.5), env="code", text="x" * 3 * MOST_CHARS),
    ]
    later = pending(9)
    with opened(tmp_path, groups_per_step=10) as archive:
        for group in (*groups, later):
            archive.scored(group, "queued", 12.0)
        archive.batch_formed(batch_of(1, *groups))
        archive.batch_formed(batch_of(2, later))
        archive.scored(pending(12, (0.0, 0.0)), "equal_rewards", 15.0)
    return tmp_path


def test_every_env_has_its_turn(run_dir: Path) -> None:
    """First a group of each env, then the second ones; of a group the best and the worst, or one where all are equal."""
    rows = read_samples(run_dir, 1, 4)
    assert [(row["env"], row["task"], row["reward"]) for row in rows] == [
        ("math", 0, 1.0),
        ("math", 0, 0.0),
        ("code", 3, 0.5),
        ("math", 1, 0.75),
    ]
    best = rows[0]
    assert (best["prompt"], best["reply"]) == ("[user] question 0", "says 1.0")
    assert (best["version"], best["group_mean"], best["tokens"]) == (0, 0.5, 5)


def test_texts_are_bounded(run_dir: Path) -> None:
    """A tracker is no place for a book; the end of a prompt says what is asked."""
    assert all(len(row["prompt"]) <= MOST_CHARS for row in read_samples(run_dir, 1, 99))


def test_a_step_of_which_nothing_was_kept_has_no_samples(run_dir: Path, tmp_path: Path) -> None:
    """And neither has one that is not there."""
    assert read_samples(run_dir, 7, 4) == []
    assert len(read_samples(run_dir, 2, 99)) == 2
