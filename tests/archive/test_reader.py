"""Reading what was kept: filters, pages, conversations, and runs that have only a journal."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.archive import ArchivedGroup, OutcomeCount, RolloutReader
from orchestrator.archive.records import content_text, decode_rollouts, text_of, tool_calls_of
from orchestrator.archive.schema import FILE
from orchestrator.errors import ConfigError, JournalError
from orchestrator.journal import Journal
from tests.support.archived import batch_of, conversation, evaluated, failure, opened, pending, scored_group

JOURNAL: dict[str, Any] = {
    "commit_interval_s": 0.01,
    "commit_bytes": 1 << 20,
    "keep_batches": 4,
    "max_backlog_bytes": 1 << 30,
    "compress": 0,
    "fsync": False,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two batches, a rejected group, one that failed, an evaluation, and one that is queued."""
    first, second = pending(0, (0.0, 1.0)), pending(1, (0.5, 0.75), env="code", version=1)
    third, queued = pending(2, (0.25, 0.5), version=2, text="The Zürich question"), pending(9, version=3)
    with opened(tmp_path) as archive:
        archive.scored(first, "queued", 12.0)
        archive.batch_formed(batch_of(1, first))
        archive.scored(second, "queued", 13.0)
        archive.scored(third, "queued", 14.0)
        archive.batch_formed(batch_of(2, second, third))
        archive.scored(pending(3, (0.0, 0.0), version=2), "equal_rewards", 15.0)
        archive.dropped(pending(4, (), version=2), "raised", 16.0)
        archive.evaluated(evaluated(5, (1.0,), step=2), 17.0)
        archive.scored(queued, "queued", 18.0)
    return tmp_path


@pytest.fixture
def reader(run_dir: Path) -> Iterator[RolloutReader]:
    with RolloutReader(str(run_dir)) as reader:
        yield reader


def ids(groups: Iterator[ArchivedGroup]) -> list[str]:
    return [group.id for group in groups]


def test_a_group_has_its_numbers_and_its_conversations(reader: RolloutReader) -> None:
    """Every column says what was told, and the rollouts are in the order of the results."""
    group = reader.group("code/train/1")
    assert group is not None
    assert (group.env, group.split, group.task, group.epoch, group.position) == ("code", "train", 1, 0, 1)
    assert (group.step, group.version, group.version_end, group.outcome) == (2, 1, 2, "trained")
    assert (group.rewards, group.size, group.tokens, group.truncated) == ((0.5, 0.75), 2, 10, 0)
    assert (group.min_reward, group.max_reward, group.mean_reward) == (0.5, 0.75, 0.625)
    assert group.seconds == pytest.approx(3.0)
    assert group.has_text
    one = group.rollouts[1]
    assert (one.number, one.reward, one.tokens, one.stop_reason, one.truncated) == (1, 0.75, 5, "stop", False)
    assert one.messages == [
        {"role": "user", "content": "question 1"},
        {"role": "assistant", "content": "says 0.75"},
    ]
    assert (one.metrics, one.timings, one.seats) == ({"right": 0.75}, {"total": 1.5}, {})
    assert reader.group(group.seq) == group
    assert reader.group("code/train/77") is None
    assert reader.group(77) is None


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, ["math/train/9", "eval-math/train/5@2", "math/train/4", "math/train/3", "math/train/2", "code/train/1", "math/train/0"]),
        ({"newest_first": False, "limit": 2}, ["math/train/0", "code/train/1"]),
        ({"env": "code"}, ["code/train/1"]),
        ({"split": "eval"}, ["eval-math/train/5@2"]),
        ({"step": 1}, ["math/train/0"]),
        ({"step": (1, 2), "split": "train"}, ["math/train/2", "code/train/1", "math/train/0"]),
        ({"step": 3}, ["math/train/4", "math/train/3"]),
        ({"version": 0}, ["math/train/0"]),
        ({"version": (3, 3), "split": "train"}, ["math/train/9", "math/train/4", "math/train/3", "math/train/2"]),
        ({"min_reward": 0.9, "split": "train"}, ["math/train/9", "math/train/0"]),
        ({"max_reward": 0.1}, ["math/train/9", "math/train/3", "math/train/0"]),
        ({"min_reward": 0.4, "max_reward": 0.6}, ["math/train/2", "code/train/1"]),
        ({"outcome": "equal_rewards"}, ["math/train/3"]),
        ({"outcome": "raised"}, ["math/train/4"]),
        ({"task": 2}, ["math/train/9", "math/train/2"]),
        ({"contains": "ZÜRICH"}, ["math/train/2"]),
        ({"contains": "says 0.75"}, ["code/train/1"]),
        ({"contains": "assistant"}, []),
        ({"env": "nobody"}, []),
    ],
)  # fmt: skip
def test_filters_let_through_what_was_asked_for(
    reader: RolloutReader, filters: dict[str, Any], expected: list[str]
) -> None:
    """Alone and together; a group that is in no batch counts for the step that was gathered when it ended."""
    assert ids(reader.groups(**filters)) == expected
    assert ids(reader.groups(**filters, texts=False)) == expected


def test_pages_follow_each_other_without_gaps(reader: RolloutReader) -> None:
    """The last group of a page is where the next one begins, in both directions."""
    every = ids(reader.groups())
    pages, after = list[str](), None
    while page := list(reader.groups(limit=3, after=after, texts=False)):
        pages += [group.id for group in page]
        after = page[-1].seq
    assert pages == every
    first = next(reader.groups(newest_first=False))
    assert ids(reader.groups(newest_first=False, after=first.seq)) == every[::-1][1:]


def test_one_task_is_followed_over_the_versions(reader: RolloutReader) -> None:
    """Oldest first."""
    assert [(group.version, group.outcome) for group in reader.task("math", 2)] == [
        (2, "trained"),
        (3, "queued"),
    ]


def test_counts_tell_how_groups_ended(reader: RolloutReader) -> None:
    """By env and split, with their rollouts."""
    assert set(reader.counts()) == {
        OutcomeCount("code", "train", "trained", 1, 2),
        OutcomeCount("eval-math", "eval", "evaluated", 1, 1),
        OutcomeCount("math", "train", "equal_rewards", 1, 2),
        OutcomeCount("math", "train", "queued", 1, 2),
        OutcomeCount("math", "train", "raised", 1, 0),
        OutcomeCount("math", "train", "trained", 2, 4),
    }


def test_failures_are_told_with_an_example(tmp_path: Path) -> None:
    """Those that differ only in numbers are one, with the last text; the most frequent come first."""
    with opened(tmp_path) as archive:
        archive.attempt_failed(pending(1), failure("timeout", "no answer"), 1.0)
        for position in range(5):
            archive.attempt_failed(
                pending(position), failure("raised", f"KeyError: {position}", "tb"), 2.0 + position
            )
        archive.attempt_failed(evaluated(3, (1.0,), step=1), failure("raised", "KeyError: 1"), 9.0)
    with RolloutReader(tmp_path) as reader:
        found = reader.failures()
        assert [(one.env, one.split, one.kind, one.text, one.count) for one in found] == [
            ("math", "train", "raised", "KeyError: 4", 5),
            ("eval-math", "eval", "raised", "KeyError: 1", 1),
            ("math", "train", "timeout", "no answer", 1),
        ]
        assert (found[0].task, found[0].detail) == (4, "tb")
        assert found[0].last_at - found[0].first_at == pytest.approx(4.0)
        assert [one.env for one in reader.failures("eval-math")] == ["eval-math"]


async def test_conversations_that_were_not_kept_come_from_the_journal(tmp_path: Path) -> None:
    """As long as it holds the group; then the numbers are left."""
    groups = [pending(position, (0.5, 0.5)) for position in range(4)]
    async with Journal.open(tmp_path, **JOURNAL) as journal:
        with opened(tmp_path, groups_per_step=1) as archive:
            for group in groups:
                archive.scored(group, "queued", 12.0)
                journal.record_group(scored_group(group))
            archive.scored(pending(9, (0.5, 0.5)), "queued", 12.0)
        await journal.flush()
        with RolloutReader(tmp_path) as reader:
            listed = {group.id: group.has_text for group in reader.groups(texts=False)}
            assert listed == {**{f"math/train/{n}": True for n in range(4)}, "math/train/9": False}
            assert ids(reader.groups(contains="question 3")) == ["math/train/3"]
            assert ids(reader.groups(readable=True, limit=1, texts=False)) == ["math/train/3"]
            lost = reader.group("math/train/9")
            assert lost is not None
            assert (lost.has_text, lost.rewards) == (False, (0.5, 0.5))
            assert [one.messages for one in lost.rollouts] == [[], []]


async def test_a_run_that_has_only_a_journal_is_read_from_it(tmp_path: Path) -> None:
    """An older run, or one whose archive was switched off: same records, same filters."""
    first, second = pending(0), pending(1, (0.25, 0.5), env="code")
    async with Journal.open(tmp_path, **JOURNAL) as journal:
        journal.record_group(scored_group(first))
        journal.record_group(scored_group(second))
        journal.record_batch(batch_of(1, first), lambda: None)
        await journal.flush()
    with RolloutReader(tmp_path) as reader:
        assert ids(reader.groups()) == ["code/train/1", "math/train/0"]
        assert ids(reader.groups(step=1)) == ["math/train/0"]
        assert ids(reader.groups(min_reward=0.9)) == ["math/train/0"]
        assert ids(reader.groups(contains="QUESTION 1")) == ["code/train/1"]
        group = reader.group("code/train/1")
        assert group is not None
        assert (group.outcome, group.rewards, group.tokens) == ("queued", (0.25, 0.5), 10)
        assert [(one.tokens, one.metrics) for one in group.rollouts] == [
            (5, {"right": 0.25}),
            (5, {"right": 0.5}),
        ]
        page = list(reader.groups(limit=1))
        assert ids(reader.groups(after=page[-1].seq)) == ["math/train/0"]
        assert reader.counts() == [
            OutcomeCount("code", "train", "queued", 1, 2),
            OutcomeCount("math", "train", "trained", 1, 2),
        ]
        assert reader.failures() == []


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    """With the name of what is missing."""
    with pytest.raises(ConfigError, match=r"neither rollouts\.sqlite nor a journal"):
        RolloutReader(tmp_path)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    """Whatever it is instead."""
    (tmp_path / FILE).write_bytes(b"no database " * 100)
    with pytest.raises(JournalError, match="not a database"):
        RolloutReader(tmp_path)
    (tmp_path / FILE).unlink()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(JournalError, match="no archive"):
        RolloutReader(tmp_path)


def test_whatever_an_environment_recorded_can_be_read() -> None:
    """Messages without a role, contents in parts, tool calls with arguments as an object, metrics that are no numbers."""
    import msgspec

    odd = conversation(
        "x", 1.0, messages=["just a text", {"role": "tool", "content": [{"text": "a"}, {"type": "image"}, 3]}]
    )
    odd |= {"metrics": {"a": 1, "b": "text"}, "timings": None, "seats": {"white": 0.5}}
    found = decode_rollouts(msgspec.msgpack.encode([odd]), ())
    assert found is not None
    assert found[0].messages[0] == {"role": "", "content": "just a text"}
    assert content_text(found[0].messages[1]["content"]) == "a\n[image]\n3"
    assert (found[0].metrics, found[0].timings, found[0].seats) == ({"a": 1.0}, {}, {"white": 0.5})
    calling = {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}, "odd"]}
    assert tool_calls_of(calling) == [("add", '{"a":1}')]
    assert text_of(calling) == 'add({"a":1})'
    assert content_text({"a": 1}) == '{"a":1}'
    assert decode_rollouts(b"transcript of math/3", ()) is None
