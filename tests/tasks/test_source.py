"""Which example next: seeded streams, retries first, exact resuming."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ConfigError
from orchestrator.mix import CircuitBreaker, WeightedRoundRobin, build_mix
from orchestrator.tasks.permutation import Permutation
from orchestrator.tasks.source import SourceEnv, TrainSource
from orchestrator.tasks.task import TrainTask

quick = settings(deadline=None, max_examples=60)


def make(envs: Sequence[SourceEnv], seed: int = 0) -> TrainSource:
    mix = build_mix(
        "weighted_round_robin", [env.name for env in envs], [1.0] * len(envs), rng=random.Random(0)
    )
    return TrainSource(envs, mix=mix, seed=seed)


def one(num_tasks: int | None, seed: int = 0, name: str = "a", split: str = "train") -> TrainSource:
    return make([SourceEnv(name, split, num_tasks)], seed)


def indices(source: TrainSource, count: int, env: str = "a") -> list[int]:
    return [source.next_task({env}).index for _ in range(count)]


@quick
@given(size=st.integers(1, 700), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_an_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    """Every task of the split comes exactly once per epoch."""
    order = Permutation(seed, "env", "train", epoch, size)
    assert sorted(order.at(place) for place in range(size)) == list(range(size))


def test_orders_are_spread_evenly_over_all_permutations() -> None:
    """With three tasks each of the six orders is about as frequent over the epochs."""
    counts: Counter[tuple[int, ...]] = Counter()
    for epoch in range(6000):
        order = Permutation(1, "env", "train", epoch, 3)
        counts[tuple(order.at(place) for place in range(3))] += 1
    assert len(counts) == 6
    assert max(counts.values()) < 1.35 * min(counts.values())


def test_a_large_split_needs_no_table() -> None:
    """Positions of a split with a trillion tasks are found one by one, without repeats."""
    size = 10**12
    order = Permutation(3, "env", "train", 0, size)
    places = [order.at(place) for place in range(5000)]
    assert len(set(places)) == 5000
    assert all(0 <= place < size for place in places)
    assert abs(sum(places) / 5000 / size - 0.5) < 0.03


def test_each_epoch_is_reshuffled() -> None:
    """Epochs hold the same tasks in another order, and a task knows its epoch."""
    source = one(50)
    tasks = [source.next_task() for _ in range(100)]
    first, second = [task.index for task in tasks[:50]], [task.index for task in tasks[50:]]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert [task.epoch for task in tasks] == [0] * 50 + [1] * 50
    assert [task.position for task in tasks] == list(range(100))


def test_order_depends_on_seed_env_and_split_alone() -> None:
    """Another seed, env or split is another order; the same ones are the same."""
    reference = indices(one(100), 100)
    assert indices(one(100), 100) == reference
    assert indices(one(100, seed=1), 100) != reference
    assert indices(one(100, name="b"), 100, "b") != reference
    assert indices(one(100, split="other"), 100) != reference


def test_adding_an_env_does_not_change_the_order_of_another() -> None:
    """Each env has a stream of its own."""
    alone = indices(one(40), 60)
    source = make(
        [SourceEnv("new", "train", 7), SourceEnv("a", "train", 40), SourceEnv("gen", "train", None)]
    )
    tasks = [source.next_task() for _ in range(180)]
    assert [task.index for task in tasks if task.env == "a"] == alone


def test_an_env_without_end_counts_up_from_a_seeded_offset() -> None:
    """Generated tasks never repeat, stay in epoch 0, and differ between seeds."""
    source = one(None, seed=5)
    tasks = [source.next_task() for _ in range(10)]
    start = tasks[0].index
    assert [task.index for task in tasks] == list(range(start, start + 10))
    assert {task.epoch for task in tasks} == {0}
    assert 0 <= start < 2**31
    assert one(None, seed=6).next_task().index != start


def test_tasks_to_be_retried_come_first_and_once() -> None:
    """A retried task is the env's next one; asked twice it still comes once; resolved it does not come again."""
    source = one(10)
    a, b, c = (source.next_task() for _ in range(3))
    source.retry(b)
    source.retry(b)
    source.retry(c)
    source.resolve(c)
    source.resolve(a)
    source.retry(a)
    assert source.waiting("a") == 1
    assert source.next_task() == b
    assert source.next_task().position == 3


def test_a_retry_waits_for_its_env_to_be_picked() -> None:
    """Retries do not override the mix."""
    source = make([SourceEnv("a", "train", 10), SourceEnv("b", "train", 10)])
    task = source.next_task({"a"})
    source.retry(task)
    assert source.next_task({"b"}).env == "b"
    assert source.next_task({"a"}) == task


def test_the_low_water_mark_follows_what_is_resolved() -> None:
    """Everything below it is resolved, and resolving twice changes nothing."""
    source = one(10)
    tasks = [source.next_task() for _ in range(4)]
    for position, low in ((1, 0), (3, 0), (0, 2), (0, 2), (2, 4)):
        source.resolve(tasks[position])
        assert source.low_water("a") == low


@quick
@given(data=st.data(), num_tasks=st.sampled_from([1, 3, 10, None]), seed=st.integers(0, 50))
def test_after_a_restart_every_position_is_resolved_exactly_once(
    data: st.DataObject, num_tasks: int | None, seed: int
) -> None:
    """However work was interrupted, what was resolved never comes again and what was not always does."""
    source = one(num_tasks, seed)
    everything = {position: one_task(num_tasks, seed, position) for position in range(30)}
    resolved: set[int] = set()
    for _ in range(data.draw(st.integers(1, 4))):
        flying: list[TrainTask] = []
        for _ in range(data.draw(st.integers(0, 12))):
            task = source.next_task()
            assert task.position not in resolved
            assert task == everything.setdefault(task.position, task)
            flying.append(task)
            done = data.draw(st.sampled_from(["keep", "resolve", "retry"]))
            if done == "resolve":
                chosen = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
                source.resolve(chosen)
                resolved.add(chosen.position)
            elif done == "retry":
                source.retry(flying.pop())
        low = source.low_water("a")
        source = one(num_tasks, seed)
        source.load_resolved("a", low, sorted(resolved))
        assert source.low_water("a") == low
    while source.low_water("a") < 20:
        task = source.next_task()
        assert task.position not in resolved
        resolved.add(task.position)
        source.resolve(task)
    assert resolved == set(range(max(resolved) + 1))


def one_task(num_tasks: int | None, seed: int, position: int) -> TrainTask:
    """The task at a position of a stream that nobody has touched."""
    source = one(num_tasks, seed)
    source.load_resolved("a", position, [])
    return source.next_task()


def test_gaps_are_asked_again_first_after_a_restart() -> None:
    """Unresolved positions below the last resolved one come in order, then the stream goes on."""
    source = one(100)
    again = source.load_resolved("a", 2, [3, 6, 1])
    assert again == 3
    assert [source.next_task().position for _ in range(5)] == [2, 4, 5, 7, 8]


def test_positions_that_a_queued_group_holds_are_not_asked_again_until_they_are_let_go() -> None:
    """They keep the low-water mark down; resolving them moves it, retrying them asks them again."""
    source = one(100)
    assert source.load_resolved("a", 2, [3, 6], held={0, 2, 5, 8}) == 2
    assert [source.next_task().position for _ in range(3)] == [4, 7, 9]
    assert source.low_water("a") == 2
    source.resolve(one_task(100, 0, 2))
    assert source.low_water("a") == 4
    source.retry(one_task(100, 0, 5))
    source.retry(one_task(100, 0, 0))
    assert [source.next_task().position for _ in range(2)] == [5, 10]
    other = one(100)
    other.load_resolved("a", 6, [], held={3})
    assert other.next_task().position == 6


def test_a_task_of_the_earlier_run_may_be_resolved_before_it_is_handed_out_again() -> None:
    """A recovered group resolves its task; those handed out before it are asked again."""
    source = one(100)
    task = one_task(100, 0, 3)
    source.load_resolved("a", 1, [])
    source.resolve(task)
    assert [source.next_task().position for _ in range(3)] == [1, 2, 4]


def test_an_env_goes_on_at_its_place_whatever_became_of_the_others() -> None:
    """Envs that are new start at their first task; one that comes back after a while finds its place again."""
    other = make([SourceEnv("a", "train", 10), SourceEnv("d", "train", None)])
    assert other.load_resolved("a", 0, [1]) == 1
    assert other.next_task({"a"}).position == 0
    assert other.next_task({"a"}).position == 2
    assert other.next_task({"d"}).position == 0
    third = make([SourceEnv("a", "train", 10), SourceEnv("b", "train", 10)])
    assert third.load_resolved("b", 4, []) == 0
    assert third.next_task({"b"}).position == 4


def test_nothing_to_do_is_told_apart_while_probes_are_out() -> None:
    """With every env in quarantine and its probe in flight there is no task, until the probe is back."""
    source = one(10)
    mix = source.mix
    assert isinstance(mix, CircuitBreaker)
    for _ in range(40):
        mix.on_dispatch("a", 1, now=0.0)
        mix.on_finish("a", 1, 0, now=0.0)
    assert source.try_next_task() is not None
    mix.on_dispatch("a", 1, now=0.0)
    assert source.try_next_task() is None
    mix.on_finish("a", 1, 0, now=1.0)
    assert source.try_next_task() is not None


def test_any_strategy_serves_behind_its_breaker() -> None:
    """The source asks the breaker alone."""
    plain = WeightedRoundRobin(["a"], [1.0], rng=random.Random(0))
    source = TrainSource([SourceEnv("a", "train", 3)], mix=CircuitBreaker(plain), seed=0)
    task = source.try_next_task()
    assert task is not None
    assert task.key == "a/train/0"


@pytest.mark.parametrize(
    ("envs", "mixed", "complaint"),
    [
        ([SourceEnv("a", "train", 0)], ["a"], 'split "train" has no tasks'),
        ([SourceEnv("a", "train", 1), SourceEnv("a", "train", 1)], ["a"], "same name"),
        ([SourceEnv("a", "train", 1)], ["a", "b"], "do not have the same envs: b"),
    ],
)
def test_envs_that_make_no_source_are_refused(
    envs: list[SourceEnv], mixed: list[str], complaint: str
) -> None:
    """Empty splits, repeated names, and a mix of other envs are configuration errors."""
    mix = build_mix("flow", mixed, [1.0] * len(mixed), rng=random.Random(0))
    with pytest.raises(ConfigError, match=complaint):
        TrainSource(envs, mix=mix, seed=0)
