"""The batch buffer: what is emitted, in which order, and that nothing is lost."""

import itertools
import random
import sys
import tracemalloc
import weakref
from types import FrameType
from typing import Any

import numpy as np
import pytest

from orchestrator.buffer import BatchBuffer
from orchestrator.groups.group import Group, plain_facts
from orchestrator.tasks.task import TrainTask


def fill(buffer: BatchBuffer[int], env: str, sizes: list[int], *, first: int = 0) -> None:
    """Add groups of one env; items count from `first`."""
    for at, size in enumerate(sizes, start=first):
        buffer.add(at, env=env, size=size)


def test_an_exact_batch_is_found_where_taking_what_fits_misses_it() -> None:
    """Sizes 8, 8, 8 and nine times 7 hold an exact 64: 8 + 8×7, with the oldest 8."""
    buffer: BatchBuffer[int] = BatchBuffer(64)
    fill(buffer, "math", [8, 8, 8, *[7] * 9])
    assert buffer.take() == [0, 3, 4, 5, 6, 7, 8, 9, 10]
    assert len(buffer) == 3
    assert buffer.sequences == 8 + 8 + 7
    assert buffer.take() is None


def test_the_oldest_groups_come_first() -> None:
    """Where any eight of equal size make a batch, batches follow the order of arrival."""
    buffer: BatchBuffer[int] = BatchBuffer(16)
    fill(buffer, "math", [2] * 24)
    assert [buffer.take() for _ in range(4)] == [
        list(range(8)),
        list(range(8, 16)),
        list(range(16, 24)),
        None,
    ]


def test_a_group_that_fits_no_exact_batch_is_passed_over_and_kept() -> None:
    """A 3 among 4s does not stop batches of 8, and is still there afterwards."""
    buffer: BatchBuffer[int] = BatchBuffer(8)
    fill(buffer, "math", [3, 4, 4, 5])
    assert buffer.take() == [0, 3]
    assert buffer.take() == [1, 2]
    assert len(buffer) == 0


def test_ordered_by_version_a_late_group_of_an_old_version_goes_first() -> None:
    """The queue is walked by version, then by arrival."""
    buffer: BatchBuffer[str] = BatchBuffer(4, order="version")
    for item, version in [("a", 3), ("b", 3), ("c", 2), ("d", 3), ("late", 1), ("e", 2)]:
        buffer.add(item, env="math", size=2, version=version)
    assert buffer.take() == ["late", "c"]
    assert buffer.take() == ["e", "a"]
    assert buffer.oldest_version == 3


def test_a_minimum_draws_younger_groups_of_its_env_into_the_batch() -> None:
    """Older groups of other envs give way until the minimum is met, and keep their place."""
    buffer: BatchBuffer[int] = BatchBuffer(8, minimums={"code": 0.5})
    fill(buffer, "math", [2] * 6)
    assert buffer.take() is None
    fill(buffer, "code", [2] * 3, first=100)
    assert buffer.take() == [0, 1, 100, 101]
    assert buffer.queued_by_env == {"code": 2, "math": 8}


@pytest.mark.parametrize(
    ("batch_size", "shares", "expected"),
    [
        (100, {"a": 0.29}, {"a": 29}),
        (100, {"a": 0.57, "b": 0.43}, {"a": 57, "b": 43}),
        (10, {"a": 0.11}, {"a": 2}),
        (1000, {"a": 0.007}, {"a": 7}),
        (64, {"a": 0.6, "b": 0.6}, {"a": 32, "b": 32}),
        (64, {"a": 0.9, "b": 0.3}, {"a": 48, "b": 16}),
        (64, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 22, "b": 21, "c": 21}),
        (100, {"a": 0.333, "b": 0.333, "c": 0.333}, {"a": 34, "b": 33, "c": 33}),
        (8, {"a": 0.0}, {}),
        (8, {"a": 1}, {"a": 8}),
    ],
)
def test_minimums_are_exact_and_can_always_be_kept_together(
    batch_size: int, shares: dict[str, float], expected: dict[str, int]
) -> None:
    """A share is the decimal that was written, rounded up; above 100 % in sum they are scaled to a batch."""
    buffer: BatchBuffer[int] = BatchBuffer(batch_size, minimums=shares)
    assert buffer.minimums == expected
    assert sum(buffer.minimums.values()) <= batch_size


def test_the_minimum_of_an_unavailable_env_is_waived_until_it_returns() -> None:
    """Training goes on without a dead env, its queued groups stay usable, and explain says so."""
    buffer: BatchBuffer[int] = BatchBuffer(8, minimums={"code": 0.5})
    fill(buffer, "math", [4] * 5)
    buffer.add(99, env="code", size=1)
    assert buffer.take() is None
    assert buffer.needed({}) == {"code"}
    buffer.set_available("code", False)
    assert "waived" in buffer.explain()
    assert '"code"' in buffer.explain()
    assert buffer.needed({}) == frozenset()
    assert buffer.take() == [0, 1]
    buffer.set_available("code", True)
    assert buffer.take() is None
    fill(buffer, "code", [4], first=200)
    assert buffer.take() == [2, 200]


def test_explain_says_in_one_sentence_what_is_missing() -> None:
    """Too few sequences, an env below its minimum, sizes that do not add up, or a batch."""
    buffer: BatchBuffer[int] = BatchBuffer(64, minimums={"math": 0.5})
    fill(buffer, "code", [3] * 4)
    assert buffer.explain() == "12 of 64 sequences are queued"
    fill(buffer, "code", [3] * 20)
    fill(buffer, "math", [3] * 4)
    assert buffer.explain() == 'env "math" has 12 of its minimum of 32 sequences'
    fill(buffer, "math", [3] * 8)
    assert buffer.explain() == 'groups of sizes 3 (×36) cannot make exactly 64 with at least 32 of env "math"'
    buffer.add(0, env="math", size=1)
    assert buffer.explain() == "a batch of 64 sequences can be taken"
    assert "\n" not in buffer.explain()


def test_eviction_removes_older_versions_and_nothing_else() -> None:
    """What was sampled before the version leaves in queue order; the rest keeps its order."""
    buffer: BatchBuffer[int] = BatchBuffer(4)
    for at, version in enumerate([5, 3, 4, 3, 6, 4]):
        buffer.add(at, env="math" if at % 2 else "code", size=1 + at % 2, version=version)
    assert buffer.oldest_version == 3
    assert buffer.evict_older_than(3) == []
    assert buffer.evict_older_than(5) == [1, 2, 3, 5]
    assert buffer.oldest_version == 5
    assert buffer.sequences == 2
    assert buffer.queued_by_env == {"code": 2, "math": 0}
    assert buffer.evict_older_than(100) == [0, 4]
    assert buffer.oldest_version is None
    assert len(buffer) == 0


BAD_GROUPS: list[dict[str, Any]] = [
    {"size": 0},
    {"size": -1},
    {"size": 9},
    {"size": 2.5},
    {"size": float("nan")},
    {"size": "2"},
    {"size": 2, "version": 1.5},
    {"size": 2, "env": "unheard-of"},
]


@pytest.mark.parametrize("bad", BAD_GROUPS)
def test_a_refused_group_leaves_the_buffer_as_it_was(bad: dict[str, Any]) -> None:
    """The error names the value, and the queue, its counts and the next batch are unchanged."""
    buffer: BatchBuffer[int] = BatchBuffer(8, envs=["math", "code"], minimums={"math": 0.25})
    fill(buffer, "math", [3, 4, 4, 2])
    before = (len(buffer), buffer.sequences, buffer.queued_by_env, buffer.oldest_version, buffer.explain())
    arguments = {"env": "math", **bad}
    offender = str(bad.get("env", bad.get("version", bad["size"])))
    with pytest.raises(ValueError, match=offender):
        buffer.add(99, **arguments)
    after = (len(buffer), buffer.sequences, buffer.queued_by_env, buffer.oldest_version, buffer.explain())
    assert after == before
    assert buffer.take() == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"batch_size": 0}, "0"),
        ({"batch_size": -4}, "-4"),
        ({"batch_size": 2.5}, "2.5"),
        ({"minimums": {"math": 1.01}}, "1.01"),
        ({"minimums": {"math": -0.1}}, "-0.1"),
        ({"minimums": {"math": float("nan")}}, "nan"),
        ({"minimums": {"math": float("inf")}}, "inf"),
        ({"minimums": {"math": "much"}}, "much"),
        ({"minimums": {"maths": 0.5}, "envs": ["math"]}, "maths"),
        ({"quotas": {"math": 0.0}}, "above 0"),
        ({"quotas": {"math": -1.0}}, "-1.0"),
        ({"quotas": {"math": 1.0}, "envs": ["math", "code"]}, "code"),
        ({"quotas": {"math": 1.0}, "minimums": {"math": 0.5}}, "exclude"),
        ({"quotas": {"math": 1.0}, "unit": "tokens"}, "tokens|token"),
        ({"unit": "bytes"}, "bytes"),
        ({"order": "newest"}, "newest"),
        ({"on_starved": "panic"}, "panic"),
        ({"on_stuck": "panic"}, "panic"),
        ({"on_stuck": "split"}, "function"),
        ({"stuck_after_s": -1.0}, "-1.0"),
    ],
)
def test_a_bad_setting_is_refused_and_named(arguments: dict[str, Any], named: str) -> None:
    """Constructing with a value that cannot be meant is a ValueError that names it."""
    with pytest.raises(ValueError, match=named):
        BatchBuffer(**{"batch_size": 8, **arguments})


def test_an_unknown_env_cannot_be_made_unavailable() -> None:
    """Where the envs are given, a name outside of them is an error."""
    buffer: BatchBuffer[int] = BatchBuffer(8, envs=["math"])
    with pytest.raises(ValueError, match="maths"):
        buffer.set_available("maths", False)


def test_whole_numbers_of_other_types_are_accepted() -> None:
    """numpy integers, as lengths and counts often are, count as what they are."""
    buffer: BatchBuffer[int] = BatchBuffer(4)
    buffer.add(1, env="math", size=np.int64(4), version=np.int32(2))  # type: ignore[arg-type]  # on purpose
    assert buffer.oldest_version == 2
    assert buffer.take() == [1]


@pytest.mark.parametrize("seed", range(6))
def test_over_a_long_stream_every_group_leaves_exactly_once(seed: int) -> None:
    """Added = taken + evicted + still there, at every moment, and every batch is exact with its minimums."""
    rng = random.Random(seed)
    batch_size = rng.choice([16, 64, 100])
    envs = ["math", "code", "logic", "search"]
    sizes = rng.choice([[1, 2, 4, 8, 16], [7, 8], list(range(1, 17))])
    buffer: BatchBuffer[int] = BatchBuffer(
        batch_size, minimums={"math": 0.1, "code": 0.25}, order=rng.choice(["arrival", "version"])
    )
    queued: dict[int, tuple[str, int, int]] = {}
    gone: set[int] = set()
    down: set[str] = set()
    batches = 0
    for at in range(3000):
        group = (rng.choice(envs), rng.choice(sizes), at // 300 - rng.randint(0, 2))
        queued[at] = group
        buffer.add(at, env=group[0], size=group[1], version=group[2])
        left: list[int] = []
        if rng.random() < 0.2:
            while batch := buffer.take():
                by_env = {env: sum(queued[i][1] for i in batch if queued[i][0] == env) for env in envs}
                assert sum(by_env.values()) == batch_size
                assert all(by_env[env] >= least for env, least in buffer.minimums.items() if env not in down)
                batches += 1
                left += batch
        if rng.random() < 0.01:
            left += buffer.evict_older_than(at // 300 - 1)
        if rng.random() < 0.01:
            env = rng.choice(envs)
            down ^= {env}
            buffer.set_available(env, env not in down)
        assert len(left) == len(set(left))
        assert gone.isdisjoint(left)
        gone.update(left)
        for item in left:
            del queued[item]
        assert len(buffer) == len(queued)
        assert buffer.sequences == sum(size for _, size, _ in queued.values())
        assert buffer.oldest_version == min((v for _, _, v in queued.values()), default=None)
    assert batches > 50


def lines_of_a_take(queued: int) -> int:
    """Lines of code that one `take` runs with this many groups queued."""
    rng = random.Random(5)
    buffer: BatchBuffer[int] = BatchBuffer(256, minimums={"math": 0.1, "code": 0.25})
    for at in range(queued):
        buffer.add(at, env=rng.choice(["math", "code", "logic", "search"]), size=rng.randint(1, 16))
    counter = itertools.count()

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            next(counter)
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        batch = buffer.take()
    finally:
        sys.settrace(previous)
    assert batch is not None
    return next(counter)


def test_the_work_of_forming_a_batch_does_not_grow_with_the_queue() -> None:
    """Sixteen times the queue runs no more code."""
    assert lines_of_a_take(32_000) <= 1.3 * lines_of_a_take(2_000)


class Item:
    """Something whose end can be watched."""


def test_what_left_the_buffer_is_not_kept_alive_by_it() -> None:
    """A taken group's memory is free as soon as the caller lets go of it."""
    buffer: BatchBuffer[Item] = BatchBuffer(4)
    items = [Item() for _ in range(10)]
    watched = [weakref.ref(item) for item in items]
    for item in items:
        buffer.add(item, env="math", size=2)
    del item
    items.clear()
    assert buffer.take() is not None
    assert [ref() is None for ref in watched] == [True] * 2 + [False] * 8


def test_a_buffered_token_takes_at_most_ten_bytes() -> None:
    """Groups of eight sequences of 2,000 tokens: nine bytes a token, and small change."""
    lengths = (2000,) * 8
    tokens = sum(lengths)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        buffer: BatchBuffer[Group] = BatchBuffer(64)
        for at in range(20):
            group = Group(
                task=TrainTask("math", "train", at, 0, at),
                version=0,
                version_end=0,
                rollouts=8,
                lengths=lengths,
                tokens=np.zeros(tokens, np.int32),
                mask=np.zeros(tokens, np.uint8),
                logprobs=np.zeros(tokens, np.float32),
                rewards=np.zeros(8, np.float32),
                advantages=np.zeros(8, np.float32),
                facts=plain_facts(8, version=0, version_end=0),
                details=b"",
                digest=0,
            )
            buffer.add(group, env=group.env, size=group.size, version=group.version)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / (20 * tokens) <= 10
