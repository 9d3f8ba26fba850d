"""The batch buffer's options: token budgets, quotas, splitting what is stuck, and what is needed."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.buffer import BatchBuffer
from orchestrator.buffer.quotas import Quotas

ENVS = ["math", "code", "logic"]
Sequences = tuple[int, ...]


def split(item: Sequences, count: int) -> tuple[Sequences, Sequences]:
    return item[:count], item[count:]


@pytest.mark.parametrize("seed", range(5))
def test_a_token_budget_is_never_exceeded_and_nothing_is_lost(seed: int) -> None:
    """Batches stay within the budget, come near it, and hold every group exactly once."""
    rng = random.Random(seed)
    buffer: BatchBuffer[int] = BatchBuffer(10_000, unit="tokens", minimums={"math": 0.25})
    tokens: dict[int, int] = {}
    env_of: dict[int, str] = {}
    taken: list[int] = []
    for at in range(600):
        tokens[at], env_of[at] = rng.randint(1, 900), rng.choice(ENVS)
        buffer.add(at, env=env_of[at], size=rng.randint(1, 8), tokens=tokens[at])
        while batch := buffer.take():
            assert batch == sorted(batch)
            assert 9_100 < sum(tokens[i] for i in batch) <= 10_000
            assert sum(tokens[i] for i in batch if env_of[i] == "math") >= 2_500
            taken += batch
    assert len(taken) == len(set(taken))
    assert len(taken) + len(buffer) == 600
    assert len(taken) > 400


def test_a_token_batch_is_the_oldest_that_fit() -> None:
    """A group that does not fit any more is passed over for younger ones that do, and comes next."""
    buffer: BatchBuffer[int] = BatchBuffer(100, unit="tokens")
    for at, tokens in enumerate([60, 30, 50, 9, 1, 70]):
        buffer.add(at, env="math", size=2, tokens=tokens)
    assert buffer.sequences == 12
    assert buffer.take() == [0, 1, 3, 4]
    assert buffer.take() == [2]
    assert buffer.take() is None
    assert buffer.explain() == "70 of 100 tokens are queued"


def test_a_token_minimum_is_waited_for_and_waived_like_any_other() -> None:
    """An env below its minimum holds the batch back until it has enough or is unavailable."""
    buffer: BatchBuffer[int] = BatchBuffer(100, unit="tokens", minimums={"code": 0.5})
    for at in range(4):
        buffer.add(at, env="math", size=1, tokens=50)
    assert buffer.take() is None
    assert buffer.explain() == 'env "code" has 0 of its minimum of 50 tokens'
    assert buffer.needed({}) == {"code"}
    buffer.add(9, env="code", size=1, tokens=50)
    assert buffer.take() == [0, 9]
    buffer.set_available("code", False)
    assert buffer.take() == [1, 2]


def test_minimums_of_long_groups_that_do_not_fit_together_do_not_block() -> None:
    """Where whole groups overshoot both minimums, a batch still comes, within the budget."""
    buffer: BatchBuffer[int] = BatchBuffer(100, unit="tokens", minimums={"math": 0.5, "code": 0.5})
    for at in range(4):
        buffer.add(at, env="math" if at % 2 else "code", size=1, tokens=60)
    assert buffer.take() == [0]


@pytest.mark.parametrize("tokens", [None, 0, -3, 101, 1.5])
def test_a_group_without_a_usable_number_of_tokens_is_refused(tokens: int | None) -> None:
    """Missing, below 1 or above the budget: a ValueError, and the buffer stays empty."""
    buffer: BatchBuffer[int] = BatchBuffer(100, unit="tokens")
    with pytest.raises(ValueError, match=str(tokens)):
        buffer.add(1, env="math", size=1, tokens=tokens)
    assert len(buffer) == 0
    assert buffer.queued_by_env == {}


def test_quotas_follow_the_targets_by_largest_remainder_and_carry_over() -> None:
    """Thirds of 10 come out as 4, 3, 3 in turns, so that after three batches all have ten."""
    buffer: BatchBuffer[str] = BatchBuffer(10, quotas={"math": 1, "code": 1, "logic": 1})
    for env in ENVS:
        for _ in range(30):
            buffer.add(env, env=env, size=1)
    batches = [Counter(buffer.take()) for _ in range(3)]
    assert sorted(batches[0].values()) == [3, 3, 4]
    assert sum(batches, Counter()) == Counter(dict.fromkeys(ENVS, 10))


@pytest.mark.parametrize("sizes", [[1, 2, 4, 8], [7, 8], [8], list(range(1, 17))])
def test_delivered_shares_stay_near_their_targets_over_any_number_of_batches(sizes: list[int]) -> None:
    """What whole groups cannot give in one batch is made up for: the gap never exceeds two groups."""
    rng = random.Random(2)
    targets = {"math": 0.53, "code": 0.3, "logic": 0.17}
    buffer: BatchBuffer[tuple[str, int]] = BatchBuffer(64, quotas=targets)
    delivered: Counter[str] = Counter()
    batches = 0
    for _ in range(4000):
        env, size = rng.choice(ENVS), rng.choice(sizes)
        buffer.add((env, size), env=env, size=size)
        if min(buffer.queued_by_env.values()) >= 64 and (batch := buffer.take()):
            batches += 1
            for name, count in batch:
                delivered[name] += count
            for name, share in targets.items():
                assert abs(delivered[name] - share * 64 * batches) <= 2 * max(sizes)
    assert batches > 50


def test_a_starved_env_is_made_up_for_by_the_others_by_their_targets() -> None:
    """With `redistribute` a batch comes at once, and what the starved env missed is not owed to it later."""
    buffer: BatchBuffer[str] = BatchBuffer(12, quotas={"math": 2, "code": 1, "logic": 1})
    for env, count in {"math": 40, "code": 40, "logic": 1}.items():
        for _ in range(count):
            buffer.add(env, env=env, size=1)
    assert buffer.needed({}) == set(), "the others make up for it"
    batch = Counter(buffer.take())
    assert (batch["logic"], batch["math"] + batch["code"]) == (1, 11)
    assert batch["math"] in (7, 8)
    for _ in range(30):
        buffer.add("logic", env="logic", size=1)
    assert Counter(buffer.take())["logic"] in (3, 4)


def test_a_starved_env_is_waited_for_unless_it_is_unavailable() -> None:
    """With `wait` no batch comes before every available env has its quota; explain names who is short."""
    buffer: BatchBuffer[str] = BatchBuffer(8, quotas={"math": 1, "code": 1}, on_starved="wait")
    for _ in range(20):
        buffer.add("math", env="math", size=1)
    buffer.add("code", env="code", size=1)
    assert buffer.take() is None
    assert buffer.explain() == 'env "code" has 1 of its quota of 4 sequences'
    buffer.set_available("code", False)
    assert Counter(buffer.take()) == {"math": 7, "code": 1}
    buffer.set_available("code", True)
    assert buffer.take() is None
    for _ in range(6):
        buffer.add("code", env="code", size=1)
    assert Counter(buffer.take()) == {"math": 4, "code": 4}


def test_what_quotas_carry_over_survives_a_restart() -> None:
    """A new buffer that loads the state goes on with the same quotas."""
    targets = {"math": 1, "code": 1, "logic": 1}

    def filled() -> BatchBuffer[str]:
        buffer: BatchBuffer[str] = BatchBuffer(10, quotas=targets)
        for env in ENVS:
            for _ in range(30):
                buffer.add(env, env=env, size=1)
        return buffer

    going, restarted = filled(), filled()
    first = Counter(going.take())
    state = going.state_dict()
    restarted.load_state_dict({**state, "retired": "1/2"})
    assert restarted.state_dict() == state
    second = Counter(going.take())
    assert second == Counter(restarted.take())
    assert second != first
    assert BatchBuffer[str](10).state_dict() == {}


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    st.integers(1, 60),
    st.lists(st.lists(st.integers(0, 60), min_size=5, max_size=5), min_size=1, max_size=6),
)
def test_a_plan_always_sums_to_the_batch_and_never_asks_for_more_than_is_queued(
    weights: list[int], batch_size: int, stocks: list[list[int]]
) -> None:
    """Whatever was delivered before, quotas are whole, in stock and sum to the batch; carries sum to zero."""
    targets = {f"env{at}": float(weight) for at, weight in enumerate(weights)}
    quotas = Quotas(targets)
    rng = random.Random(batch_size)
    for stock in stocks:
        queued = dict(zip(targets, stock, strict=False))
        if sum(queued.values()) < batch_size:
            continue
        plan = quotas.plan(batch_size, queued)
        assert sum(plan.counts.values()) == batch_size
        assert all(0 <= plan.counts[env] <= queued[env] for env in targets)
        delivered = dict(plan.counts)
        giver, taker = rng.choice(list(targets)), rng.choice(list(targets))
        moved = min(delivered[giver], 3)
        delivered[giver] -= moved
        delivered[taker] += moved
        quotas.settle(plan, delivered)
        assert sum(quotas.carried.values()) == 0


def test_a_stuck_queue_is_split_after_the_limit_and_nothing_is_lost() -> None:
    """Sizes of 3 cannot make 64: after the limit one group is split, and its rest comes next."""
    buffer: BatchBuffer[Sequences] = BatchBuffer(
        64, on_stuck="split", stuck_after_s=10, split=split, envs=["math", "code"]
    )
    for at in range(0, 90, 3):
        buffer.add((at, at + 1, at + 2), env="math", size=3)
    assert buffer.take() is None
    assert buffer.take(now=100.0) is None
    assert buffer.take(now=109.9) is None
    batch = buffer.take(now=110.0)
    assert batch is not None
    assert Counter(len(item) for item in batch) == {3: 21, 1: 1}
    assert buffer.sequences == 26
    buffer.add(tuple(range(90, 128)), env="math", size=38)
    rest = buffer.take()
    assert rest is not None
    assert sorted(n for item in batch + rest for n in item) == list(range(128))


def test_the_time_stuck_starts_again_after_every_batch() -> None:
    """A batch that came in between resets the limit."""
    buffer: BatchBuffer[Sequences] = BatchBuffer(
        4, on_stuck="split", stuck_after_s=10, split=split, envs=["math", "code"]
    )
    buffer.add((1, 2, 3), env="math", size=3)
    buffer.add((4, 5, 6), env="math", size=3)
    assert buffer.take(now=0.0) is None
    buffer.add((7,), env="math", size=1)
    assert buffer.take(now=9.0) == [(1, 2, 3), (7,)]
    buffer.add((8, 9, 10), env="math", size=3)
    assert buffer.take(now=11.0) is None
    assert buffer.take(now=20.9) is None
    assert buffer.take(now=21.0) is not None


def test_a_queue_that_lacks_groups_is_not_stuck() -> None:
    """Too few sequences, or an env below its minimum, are waited for however long it takes."""
    buffer: BatchBuffer[Sequences] = BatchBuffer(
        4, minimums={"code": 0.5}, on_stuck="split", stuck_after_s=0, split=split
    )
    buffer.add((1, 2, 3), env="math", size=3)
    assert buffer.take(now=0.0) is None
    buffer.add((4, 5, 6), env="math", size=3)
    assert buffer.take(now=1e9) is None
    assert len(buffer) == 2


def test_two_groups_are_split_where_one_is_not_enough() -> None:
    """Minimums of half the batch each, sizes 3 and 3: both envs need a cut to give exactly 5."""
    buffer: BatchBuffer[Sequences] = BatchBuffer(
        10, minimums={"math": 0.5, "code": 0.5}, on_stuck="split", stuck_after_s=0, split=split
    )
    for at, env in [(0, "math"), (3, "math"), (6, "code"), (9, "code")]:
        buffer.add((at, at + 1, at + 2), env=env, size=3)
    batch = buffer.take(now=0.0)
    assert batch is not None
    taken = sorted(n for item in batch for n in item)
    assert sum(n < 6 for n in taken) == 5
    assert len(taken) == 10
    assert buffer.sequences == 2


def test_a_failing_split_leaves_the_buffer_as_it_was() -> None:
    """The error of the splitting function comes through and every group is still whole."""

    def broken(item: Sequences, count: int) -> tuple[Sequences, Sequences]:
        raise RuntimeError("no scissors")

    buffer: BatchBuffer[Sequences] = BatchBuffer(4, on_stuck="split", stuck_after_s=0, split=broken)
    buffer.add((1, 2, 3), env="math", size=3)
    buffer.add((4, 5, 6), env="math", size=3)
    with pytest.raises(RuntimeError, match="no scissors"):
        buffer.take(now=0.0)
    assert (len(buffer), buffer.sequences) == (2, 6)
    buffer.add((7,), env="math", size=1)
    assert buffer.take() == [(1, 2, 3), (7,)]


@pytest.mark.parametrize("seed", range(8))
def test_with_splitting_every_full_queue_gives_a_batch_and_every_sequence_leaves_once(seed: int) -> None:
    """Whenever enough of every env is queued a batch comes, exact, within its bounds, oldest parts first."""
    rng = random.Random(seed)
    by_quota = seed % 2 == 1
    buffer: BatchBuffer[Sequences] = BatchBuffer(
        50,
        minimums=None if by_quota else {"math": 0.5, "code": 0.3, "logic": 0.2},
        quotas={"math": 5, "code": 3, "logic": 2} if by_quota else None,
        on_starved="wait",
        on_stuck="split",
        stuck_after_s=0,
        split=split,
    )
    sizes = rng.choice([[3], [7, 9], [16], [6, 4]])
    env_of: dict[int, str] = {}
    taken: list[int] = []
    number = 0
    for _ in range(400):
        env, size = rng.choice(ENVS), rng.choice(sizes)
        item = tuple(range(number, number + size))
        number += size
        env_of.update(dict.fromkeys(item, env))
        buffer.add(item, env=env, size=size, version=number // 100)
        queued = buffer.queued_by_env
        full = all(queued.get(name, 0) >= least for name, least in buffer.minimums.items())
        batch = buffer.take(now=0.0)
        if not by_quota:
            assert (batch is not None) == (full and sum(queued.values()) >= 50)
        if batch is not None:
            flat = [n for part in batch for n in part]
            assert len(flat) == 50
            counts = Counter(env_of[n] for n in flat)
            assert all(counts[name] >= least for name, least in buffer.minimums.items())
            taken += flat
        assert len(taken) + buffer.sequences == number
    assert len(taken) == len(set(taken))
    assert len(taken) > number / 2


def test_a_batch_is_needed_of_every_env_until_enough_is_queued_or_coming() -> None:
    """Back-pressure is somebody else's; the buffer says what the next batch cannot do without."""
    buffer: BatchBuffer[int] = BatchBuffer(8, envs=["math", "code"])
    assert buffer.needed({}) == {"math", "code"}
    buffer.add(0, env="math", size=4)
    assert buffer.needed({"math": 3}) == {"math", "code"}
    assert buffer.needed({"math": 4}) == set()
    buffer.add(1, env="math", size=4)
    assert buffer.needed({}) == set()


def test_an_env_that_is_short_is_needed_however_much_there_is_of_the_others() -> None:
    """It is not held back by the groups of others, and what is coming of it counts."""
    buffer: BatchBuffer[int] = BatchBuffer(8, minimums={"code": 0.5}, envs=["math", "code"])
    for at in range(10):
        buffer.add(at, env="math", size=4)
    assert buffer.needed({}) == {"code"}
    assert buffer.needed({"code": 4}) == set()
    buffer.set_available("code", False)
    assert buffer.needed({}) == set()


def test_where_groups_are_not_split_the_envs_that_make_the_sum_exact_are_needed() -> None:
    """Sizes of 3 make no 8; two more of size 1 do, and nothing is needed while something is coming."""
    buffer: BatchBuffer[int] = BatchBuffer(8, envs=["math", "code"])
    buffer.add(0, env="code", size=1)
    assert buffer.needed({"math": 7}) == set()
    for at in range(3):
        buffer.add(at, env="math", size=3)
    assert buffer.needed({}) == {"code"}
    assert buffer.needed({"code": 1}) == set()
    buffer.add(4, env="code", size=1)
    assert buffer.can_take()


def test_groups_of_an_env_without_a_share_are_not_what_makes_the_sum_exact() -> None:
    """None come any more, whatever sizes they had; the others bring what they can."""
    buffer: BatchBuffer[int] = BatchBuffer(16, envs=["math", "code"])
    buffer.add(0, env="code", size=1)
    for at, size in enumerate((5, 5, 4, 4, 4)):
        buffer.add(at, env="math", size=size)
    assert buffer.needed({}) == {"code"}
    buffer.set_quotas({"math": 1.0, "code": 0.0})
    assert buffer.needed({}) == {"math"}


def test_a_stuck_queue_is_split_at_once_where_only_an_env_without_a_share_could_help() -> None:
    """Its groups, of which no size is known, will not come."""
    buffer: BatchBuffer[Sequences] = BatchBuffer(
        4, on_stuck="split", stuck_after_s=10, split=split, envs=["math", "code"]
    )
    buffer.set_quotas({"math": 1.0, "code": 0.0})
    buffer.add((1, 2, 3), env="math", size=3)
    buffer.add((4, 5, 6), env="math", size=3)
    assert buffer.take(now=5.0) == [(1,), (4, 5, 6)]


def test_by_quota_a_starved_env_is_needed_only_where_it_is_waited_for() -> None:
    """Otherwise the others make up for it."""
    for on_starved, needed in (("wait", {"code"}), ("redistribute", set())):
        buffer: BatchBuffer[int] = BatchBuffer(8, quotas={"math": 1, "code": 1}, on_starved=on_starved)  # type: ignore[arg-type]  # both of the choices
        for at in range(4):
            buffer.add(at, env="math", size=4)
        assert buffer.needed({}) == needed
        assert buffer.needed({"code": 4}) == set()


def test_at_once_splits_without_waiting_and_says_when_it_would_have() -> None:
    """Where nothing that is awaited could help, time would not either."""
    buffer: BatchBuffer[Sequences] = BatchBuffer(
        4, on_stuck="split", stuck_after_s=10, split=split, envs=["math", "code"]
    )
    buffer.add((1, 2, 3), env="math", size=3)
    assert buffer.split_at is None
    buffer.add((4, 5, 6), env="math", size=3)
    assert buffer.is_stuck(0)
    assert buffer.take(now=5.0) is None
    assert buffer.split_at == 15.0
    batch = buffer.take(now=5.0, at_once=True)
    assert batch is not None
    assert batch == [(1,), (4, 5, 6)], "one cut, of the oldest group"
    assert buffer.split_at is None


def test_a_queue_that_further_groups_cannot_make_exact_is_split_at_once() -> None:
    """Sizes of 3 make no 64 whatever comes: waiting would be idling."""
    buffer: BatchBuffer[Sequences] = BatchBuffer(64, on_stuck="split", stuck_after_s=10, split=split)
    for at in range(0, 66, 3):
        buffer.add((at, at + 1, at + 2), env="math", size=3)
    batch = buffer.take(now=0.0)
    assert batch is not None
    assert sum(map(len, batch)) == 64


def test_quotas_that_refuse_what_is_queued_ask_for_more_of_every_env() -> None:
    """The sizes alone would make a batch (4 x 6), which is too far from the quotas: something must be started."""
    buffer: BatchBuffer[str] = BatchBuffer(24, quotas={"a": 10, "b": 14}, on_starved="wait")
    buffer.load_state_dict({"a": "-10", "b": "10"})
    for env, size in [*[("a", 4)] * 6, ("a", 5), ("b", 13), ("b", 13)]:
        buffer.add(f"{env}{size}", env=env, size=size)
    assert not buffer.can_take()
    assert buffer.is_stuck(0)
    assert buffer.needed({}) == {"a", "b"}
    buffer.add("b11", env="b", size=11)
    assert buffer.can_take()
