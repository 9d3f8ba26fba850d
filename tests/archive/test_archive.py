"""What is kept, what gives way, and that nothing of it can hurt a run."""

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from orchestrator.archive import RolloutReader
from orchestrator.archive import archive as archive_module
from orchestrator.archive.schema import FILE
from orchestrator.archive.space import used_bytes
from tests.support.archived import batch_of, evaluated, failure, opened, pending, scored_group, wait_until

MIB = 2**20


def with_text(run_dir: Path) -> set[str]:
    """The groups whose conversations are kept."""
    with RolloutReader(run_dir) as reader:
        return {group.id for group in reader.groups(texts=False) if group.has_text}


def outcomes(run_dir: Path) -> dict[str, str]:
    with RolloutReader(run_dir) as reader:
        return {group.id: group.outcome for group in reader.groups(texts=False)}


def test_a_few_conversations_of_each_env_and_step_are_kept(tmp_path: Path) -> None:
    """The first, the best and the worst; the next step has places of its own, and so has every env."""
    with opened(tmp_path) as archive:
        for position, rewards in enumerate([(0.4, 0.5)] * 4 + [(0.4, 0.9)] + [(0.1, 0.5)] + [(0.2, 0.8)]):
            archive.scored(pending(position, rewards), "queued", 12.0)
        archive.scored(pending(0, env="code"), "equal_rewards", 12.0)
        archive.batch_formed(batch_of(1, pending(0)))
        archive.scored(pending(7), "queued", 12.0)
    assert with_text(tmp_path) == {
        "math/train/0",
        "math/train/4",
        "math/train/5",
        "code/train/0",
        "math/train/7",
    }


def test_a_sample_of_every_evaluation_is_kept(tmp_path: Path) -> None:
    """Under the step at which it was started; another evaluation of the same env has places of its own."""
    with opened(tmp_path) as archive:
        for step in (0, 5):
            for index in range(4):
                archive.evaluated(evaluated(index, (0.5, 0.5), step=step), 12.0)
    assert with_text(tmp_path) == {f"eval-math/train/{index}@{step}" for index in (0, 1) for step in (0, 5)}
    with RolloutReader(tmp_path) as reader:
        assert [group.step for group in reader.groups(task=3)] == [5, 0]


def test_a_group_asked_again_replaces_its_row(tmp_path: Path) -> None:
    """A resumed run doubles nothing; conversations of the group that was lost go with its row."""
    with opened(tmp_path) as archive:
        archive.scored(pending(0, text="first time"), "stale", 12.0)
        archive.evaluated(evaluated(1, (0.0,), step=3), 12.0)
    with opened(tmp_path, last_step=4, groups_per_step=0) as archive:
        archive.scored(pending(0, (0.25,), version=3, text="second time"), "queued", 12.0)
        archive.evaluated(evaluated(1, (1.0,), step=3), 12.0)
    with RolloutReader(tmp_path) as reader:
        assert [(group.id, group.rewards) for group in reader.groups(newest_first=False)] == [
            ("math/train/0", (0.25,)),
            ("eval-math/train/1@3", (1.0,)),
        ]
        assert not list(reader.groups(contains="first time"))


def test_what_was_not_told_before_a_crash_is_found_in_the_journal(tmp_path: Path) -> None:
    """Groups that are queued or in a batch get the rows that they lack; those that they have stay."""
    told, formed, queued = pending(0, text="told"), pending(1, (0.25, 0.75)), pending(2)
    with opened(tmp_path) as archive:
        archive.scored(told, "queued", 12.0)
    left = [scored_group(told), scored_group(queued)]
    with opened(tmp_path, last_step=4) as archive:
        archive.recovered(left, [batch_of(4, formed)], 20.0)
    assert outcomes(tmp_path) == {
        "math/train/0": "queued",
        "math/train/1": "trained",
        "math/train/2": "queued",
    }
    with RolloutReader(tmp_path) as reader:
        (found,) = reader.groups(step=4)
        assert (found.rewards, found.tokens, found.version) == ((0.25, 0.75), 10, 0)
        assert found.rollouts[1].messages[0]["content"] == "question 1"
        assert next(reader.groups(contains="told")).id == "math/train/0"


def test_what_a_failed_group_had_can_be_read(tmp_path: Path) -> None:
    """The rollouts that worked before another one failed it."""
    with opened(tmp_path) as archive:
        archive.dropped(pending(0, (0.5,), text="worked"), "error", 12.0)
    with RolloutReader(tmp_path) as reader:
        (found,) = reader.groups(contains="worked")
        assert (found.outcome, found.rewards, found.step) == ("error", (0.5,), 1)


def test_a_group_that_is_split_or_evicted_ends_once(tmp_path: Path) -> None:
    """The first batch that has a part of it counts; what is evicted says why, unless a part of it was trained on."""
    split, gone = pending(0), pending(1)
    with opened(tmp_path, last_step=7) as archive:
        archive.scored(split, "queued", 12.0)
        archive.scored(gone, "queued", 12.0)
        first, rest = batch_of(8, split).groups[0].split(1)
        archive.batch_formed(type(batch_of(8))(8, 7, (first,)))
        archive.evicted(rest, "split_rest")
        archive.evicted(batch_of(9, gone).groups[0], "stale")
    assert outcomes(tmp_path) == {"math/train/0": "trained", "math/train/1": "stale"}
    with RolloutReader(tmp_path) as reader:
        assert [group.step for group in reader.groups()] == [9, 8]


def test_groups_that_end_with_the_run_say_nothing(tmp_path: Path) -> None:
    """They are asked again; a group that had no time left is a failure with a reason."""
    with opened(tmp_path) as archive:
        archive.dropped(pending(0, ()), "shutdown", 12.0)
        archive.dropped(pending(1, ()), "run_complete", 12.0)
        archive.dropped(pending(2, ()), "group_deadline", 12.0)
    assert outcomes(tmp_path) == {"math/train/2": "group_deadline"}
    with RolloutReader(tmp_path) as reader:
        assert [(one.kind, one.text) for one in reader.failures()] == [
            ("group_deadline", "the group took longer than group_timeout_s")
        ]


def test_very_many_kinds_of_failures_are_counted_together(tmp_path: Path) -> None:
    """An env that says something else each time cannot fill the file."""
    letters = ["".join(chr(97 + int(digit)) for digit in str(number)) for number in range(300)]
    with opened(tmp_path) as archive:
        for word in letters:
            archive.attempt_failed(pending(1), failure("raised", f"no {word}"), 1.0)
    with RolloutReader(tmp_path) as reader:
        found = reader.failures()
    assert (len(found), found[0].count, found[0].text) == (101, 200, f"no {letters[-1]}")
    assert sum(one.count for one in found) == 300


def test_early_steps_stay_readable_when_there_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older steps are thinned out, newer ones are dense, the first is always there, and the file keeps its limit."""
    monkeypatch.setattr(archive_module, "COMMIT_S", 0.0)
    with opened(tmp_path, max_bytes=MIB, groups_per_step=1) as archive:
        for step in range(1, 401):
            noise = os.urandom(6000).hex()
            group = pending(step, text=noise)
            archive.scored(group, "queued", 12.0)
            archive.batch_formed(batch_of(step, group))
            wait_until(lambda: archive.waiting < 50)
    with RolloutReader(tmp_path) as reader:
        steps = sorted(group.step or 0 for group in reader.groups(texts=False) if group.has_text)
        assert len(list(reader.groups(texts=False))) == 400
    assert steps[0] == 1
    assert set(range(381, 401)) <= set(steps)
    assert len([step for step in steps if step <= 200]) >= 2
    assert len([step for step in steps if step > 200]) > len([step for step in steps if step <= 200])
    assert (tmp_path / FILE).stat().st_size <= 1.5 * MIB
    connection = sqlite3.connect(tmp_path / FILE)
    assert used_bytes(connection) <= MIB
    connection.close()


def test_rows_without_conversations_are_bounded_too(tmp_path: Path) -> None:
    """The oldest go; those that have a conversation stay."""
    kept = pending(0)
    with opened(tmp_path, max_bytes=MIB) as archive:
        archive.scored(kept, "queued", 12.0)
        archive.batch_formed(batch_of(1, kept))
        for position in range(1, 8001):
            archive.dropped(pending(position, ()), "raised", 12.0)
    with RolloutReader(tmp_path) as reader:
        found = [group.position for group in reader.groups(newest_first=False)]
    assert found[0] == 0
    assert 1000 < len(found) < 8000
    assert found[1:] == list(range(8001 - len(found) + 1, 8001))
    assert (tmp_path / FILE).stat().st_size <= 2 * MIB


def test_what_is_too_old_is_forgotten(tmp_path: Path) -> None:
    """Groups with their conversations, and failures, when a run goes on after that time."""
    day = 86400.0
    with opened(tmp_path, clock=40 * day) as archive:
        archive.scored(pending(0, opened_at=1 * day), "queued", 1 * day)
        archive.scored(pending(1, opened_at=39 * day), "queued", 39 * day)
        archive.attempt_failed(pending(0), failure("raised", "long ago"), 2 * day)
    with opened(tmp_path, max_days=30):
        pass
    assert with_text(tmp_path) == set(outcomes(tmp_path)) == {"math/train/1"}
    with RolloutReader(tmp_path) as reader:
        assert reader.failures() == []


# --- trouble ------------------------------------------------------------------------------------------------------


def _of_another_run(path: Path) -> None:
    with opened(path.parent, run_id="another") as archive:
        archive.scored(pending(5), "queued", 12.0)


def _foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE something (else_ INTEGER)")
    connection.close()


def _no_database(path: Path) -> None:
    path.write_bytes(b"\0nothing that SQLite knows" * 400)


def _damaged(path: Path) -> None:
    with opened(path.parent) as archive:
        for position in range(200):
            archive.scored(pending(position), "queued", 12.0)
    data = bytearray(path.read_bytes())
    data[3 * 4096 : 12 * 4096] = os.urandom(9 * 4096)
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [_of_another_run, _foreign, _no_database, _damaged])
def test_a_file_that_cannot_be_used_is_moved_aside(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """With a warning; a new one is begun, and what was there is not changed."""
    path = tmp_path / FILE
    spoil(path)
    before = path.read_bytes()
    with capture_logs() as logs, opened(tmp_path) as archive:
        archive.scored(pending(0), "queued", 12.0)
    assert [entry["event"] for entry in logs] == ["archive.moved_aside"]
    assert outcomes(tmp_path) == {"math/train/0": "queued"}
    assert (tmp_path / f"{FILE}.old-1").read_bytes() == before
    assert archive.lost == 0


def test_a_file_that_is_damaged_while_it_is_used_is_moved_aside(tmp_path: Path) -> None:
    """What is told from then on is kept in a new one."""
    with opened(tmp_path) as archive:
        archive.scored(pending(0), "queued", 12.0)
    with capture_logs() as logs, opened(tmp_path) as archive:
        wait_until(lambda: archive._store is not None)
        assert archive._store is not None

        def malformed(events: object) -> None:
            raise sqlite3.DatabaseError("database disk image is malformed")

        archive._store.apply = malformed  # type: ignore[method-assign]
        archive.scored(pending(1), "queued", 12.0)
        wait_until(lambda: not archive.waiting)
    assert "archive.moved_aside" in [entry["event"] for entry in logs]
    assert outcomes(tmp_path) == {"math/train/1": "queued"}


def test_a_disk_that_fails_costs_rows_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once, counted, and when the disk works again so does the archive."""
    monkeypatch.setattr(archive_module, "COMMIT_S", 0.0)
    blocked = tmp_path / FILE
    blocked.mkdir()
    with capture_logs() as logs, opened(tmp_path) as archive:
        for position in range(3):
            archive.scored(pending(position), "queued", 12.0)
            wait_until(lambda: not archive.waiting)
        wait_until(lambda: archive.lost == 3)
        assert archive.note.startswith("rollouts are not kept for reading (3 records are lost): ")
        assert "unable to open" in archive.note
        blocked.rmdir()
        archive.scored(pending(9), "queued", 12.0)
    assert [entry["event"] for entry in logs] == ["archive.losing", "archive.goes_on"]
    assert archive.note == ""
    assert outcomes(tmp_path) == {"math/train/9": "queued"}


def test_a_full_disk_costs_rows_and_nothing_else(tmp_path: Path) -> None:
    """What was committed before stays readable."""
    with opened(tmp_path) as archive:
        archive.scored(pending(0), "queued", 12.0)
        wait_until(lambda: not archive.waiting)
        assert archive._store is not None
        pages = archive._store._connection.execute("PRAGMA page_count").fetchone()[0]
        archive._store._connection.execute(f"PRAGMA max_page_count = {pages}")
        for position in range(1, 50):
            archive.scored(pending(position, text=os.urandom(5000).hex()), "queued", 12.0)
    assert archive.lost == 49
    assert "full" in archive.trouble
    assert outcomes(tmp_path) == {"math/train/0": "queued"}


def test_a_disk_that_hangs_neither_blocks_nor_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told returns at once, is lost beyond a bound, and the end of the run does not wait for long."""
    monkeypatch.setattr(archive_module, "QUEUE_EVENTS", 10)
    monkeypatch.setattr(archive_module, "CLOSE_S", 0.05)
    hangs = threading.Event()
    with capture_logs() as logs:
        with opened(tmp_path) as archive:
            wait_until(lambda: archive._store is not None)
            assert archive._store is not None
            archive._store.tidy = hangs.wait  # type: ignore[method-assign,assignment]
            archive.scored(pending(0), "queued", 12.0)
            wait_until(lambda: not archive._events)
            for position in range(1, 31):
                archive.scored(pending(position), "queued", 12.0)
            assert (len(archive._events), archive.lost) == (10, 20)
        hangs.set()
        archive._thread.join()
    assert [entry["event"] for entry in logs][:2] == ["archive.losing", "archive.not_closed"]


VICTIM = """
import os, signal, sys
from pathlib import Path
from tests.support.archived import opened, pending, wait_until
with opened(Path(sys.argv[1])) as archive:
    for position in range(100):
        archive.scored(pending(position), "queued", 12.0)
    wait_until(lambda: not archive.waiting)
    for position in range(100, 200):
        archive.scored(pending(position), "queued", 12.0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_committed_survives_kill_9(tmp_path: Path) -> None:
    """It can be read at once, and the next process goes on with the same file."""
    done = subprocess.run([sys.executable, "-c", VICTIM, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert set(outcomes(tmp_path)) >= {f"math/train/{position}" for position in range(100)}
    with capture_logs() as logs, opened(tmp_path) as archive:
        archive.scored(pending(300), "queued", 12.0)
    assert logs == []
    assert set(outcomes(tmp_path)) >= {"math/train/0", "math/train/300"}


def test_the_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    """Conversations may be private."""
    with opened(tmp_path) as archive:
        archive.scored(pending(0), "queued", 12.0)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
