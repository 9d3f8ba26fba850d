"""The mix inside a batch in a whole run: three envs, of which the slow ones also lose groups, as people configure them."""

import statistics
from functools import cache

import pytest

from orchestrator.groups.group import Batch
from orchestrator.simulate.neighbours import Behaviour
from tests.support.scenarios import Env, Scenario, play
from tests.support.worlds import TestedWorld, make_settings, make_world

TARGETS = {"quick": 0.4, "middle": 0.3, "slow": 0.3}
SECONDS = {"quick": 1.0, "middle": 5.0, "slow": 20.0}
LOSSES = {"quick": 0.0, "middle": 0.1, "slow": 0.4}
BATCH, GROUP, STEPS = 256, 8, 32


def behaviour(env: str, *, losses: bool) -> Behaviour:
    """Any rollout that fails costs its group."""
    loss = 1 - (1 - LOSSES[env]) ** (1 / GROUP) if losses else 0.0
    return Behaviour(latency=lambda rng: rng.expovariate(1 / SECONDS[env]), loss=loss, retryable=0.0)


@cache
def played(
    mix: str, max_versions: int, *, losses: bool = True, slots: int = 256, steps: int = STEPS
) -> TestedWorld:
    settings = make_settings(
        list(TARGETS),
        batch_size=BATCH,
        group_size=GROUP,
        train={env: {"target": target} for env, target in TARGETS.items()},
        max_versions=max_versions,
        mix=mix,
    )
    around = {env: behaviour(env, losses=losses) for env in TARGETS}
    world = TestedWorld(settings, around, max_inflight=slots, train_s=lambda rng: 5.0)
    assert world.play(until=lambda: world.steps() >= steps)
    return world


def off_target(world: TestedWorld) -> float:
    """Percentage points between share and target of the env that is furthest off, mean over batches once the first are formed."""
    found = []
    for _, _, batch in list(world.trained)[6:]:
        found.append(max(abs(share_of(env, batch) - target) for env, target in TARGETS.items()))
    return 100 * statistics.mean(found)


def share_of(env: str, batch: Batch) -> float:
    return sum(group.size for group in batch.groups if group.env == env) / BATCH


def mean_age(world: TestedWorld) -> float:
    return sum(age * count for age, count in world.ages().items()) / world.ages().total()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("max_versions", "losses"),
    [(0, False), (1, False), (1, True), (2, False), (2, True), (4, False), (4, True)],
)
def test_every_batch_follows_the_mix_though_one_env_is_slow_and_loses_groups(
    max_versions: int, losses: bool
) -> None:
    """Whole groups of eight cannot come nearer than 2.0 points in the mean; no group is passed over for ever."""
    world = played("even", max_versions, losses=losses)
    assert off_target(world) <= 2.5
    assert max(world.ages()) <= max_versions, "passed over by so many batches at most"
    assert not world.journal.evicted, "nothing that was finished is thrown away"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("losses", [False, True])
@pytest.mark.parametrize("max_versions", [2, 4])
def test_a_start_does_not_crowd_later_batches_with_a_slow_env(max_versions: int, losses: bool) -> None:
    """All that is in flight was started at once, and the first batch, which waits for nobody, has none of it."""
    world = played("even", max_versions, losses=losses)
    found = [share_of("slow", batch) for _, _, batch in world.trained]
    assert found[0] < 0.05
    late = found[max_versions + 1 :]
    assert all(abs(share - TARGETS["slow"]) < 0.08 for share in late), found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kept", [0.5, 0.2, 0.05])
def test_waiting_for_an_env_that_loses_most_of_its_groups_costs_next_to_no_time(kept: float) -> None:
    """What is lost is started again, and a batch does not wait for that too."""

    def seconds(mix: str) -> float:
        settings = make_settings(["good", "bad"], batch_size=32, group_size=4, max_versions=2, mix=mix)
        bad = Behaviour(
            latency=lambda rng: rng.expovariate(1 / 30.0), loss=1 - kept ** (1 / 4), retryable=0.0
        )
        world = TestedWorld(
            settings, {"good": Behaviour(latency=lambda rng: 1.0), "bad": bad}, train_s=lambda rng: 0.1
        )
        assert world.play(until=lambda: world.steps() >= 20)
        return world.now

    assert seconds("even") <= 1.1 * seconds("oldest")


@pytest.mark.timeout(600)
def test_an_env_that_hangs_is_waited_for_no_longer_than_its_groups_take() -> None:
    """Its server answers, its rollouts do not end, and may take hours."""
    around = {
        "good": Behaviour(latency=lambda rng: 1.0),
        "stuck": Behaviour(latency=lambda rng: 5.0 if world.now < 300.0 else 1e6),
    }
    settings = make_settings(
        list(around), batch_size=32, group_size=4, max_versions=4, rollout_timeout_s=1e5, group_timeout_s=1e5
    )
    world = TestedWorld(settings, around, max_inflight=512, train_s=lambda rng: 0.1)
    assert world.play(until=lambda: world.now >= 310.0 and world.parts.sink.awaited is not None)
    began, steps = world.now, world.steps()
    assert world.play(until=lambda: world.steps() > steps)
    assert world.now - began < 60.0


@pytest.mark.timeout(600)
def test_oldest_first_follows_the_mix_over_many_batches_only() -> None:
    """What each batch has is decided by who finishes first; this is what the other setting is for."""
    assert off_target(played("oldest", 2)) > 5


@pytest.mark.timeout(600)
def test_without_staleness_a_lost_group_does_not_hold_its_batch_up() -> None:
    """There is one batch at a time, and whoever is quickest fills the place of what was lost, as with oldest first."""
    even, oldest = played("even", 0), played("oldest", 0)
    assert even.now <= 1.02 * oldest.now
    assert off_target(even) <= off_target(oldest) + 0.5


@pytest.mark.timeout(600)
def test_while_every_slot_is_busy_the_mix_costs_neither_speed_nor_freshness() -> None:
    """With fewer slots than the pace allows, as much is trained on in the same time, and no older."""
    even, oldest = (played(mix, 2, slots=64, steps=3 * STEPS) for mix in ("even", "oldest"))
    assert off_target(even) <= 3.1 < off_target(oldest)
    assert even.now <= 1.05 * oldest.now
    assert mean_age(even) <= mean_age(oldest) + 0.05


@pytest.mark.timeout(600)
def test_an_env_that_delivers_nothing_takes_no_batch_with_it() -> None:
    """Its share goes to the others, whether it loses everything or has no server."""
    settings = make_settings(
        ["good", "bad", "gone"],
        batch_size=32,
        train={"bad": {"target": 0.5}, "good": {"target": 0.25}, "gone": {"target": 0.25}},
        max_steps=10,
        strategy_options={"breaker": True},
    )
    around = {
        "good": Behaviour(latency=lambda rng: 1.0),
        "bad": Behaviour(latency=lambda rng: 1.0, loss=1.0, retryable=0.0),
        "gone": Behaviour(latency=lambda rng: 1.0),
    }
    world = TestedWorld(settings, around, train_s=lambda rng: 0.1)
    world.kill_server("gone", 0, away_s=1e6)
    assert world.play(until=lambda: world.steps() >= 10)
    assert {group.env for _, _, batch in world.trained for group in batch.groups} == {"good"}
    assert world.now < 600


def test_what_is_carried_over_survives_the_death_of_the_process() -> None:
    """The next batch makes up for the one before, as if nothing had happened."""
    world = TestedWorld(
        make_settings(["a", "b", "c"], batch_size=16, max_steps=20),
        {env: Behaviour(latency=lambda rng: rng.expovariate(1.0)) for env in "abc"},
    )
    assert world.play(until=lambda: world.steps() >= 4)
    before = world.parts.buffer.state_dict()
    assert any(amount != "0" for amount in before.values())
    world.kill()
    assert world.parts.buffer.state_dict() == before
    assert world.play(until=lambda: world.steps() >= 20)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("publish_every", [5, 10**9], ids=["seldom", "never"])
@pytest.mark.parametrize("slots", [96, 512])
def test_the_mix_does_not_drift_where_the_trainer_publishes_seldom(publish_every: int, slots: int) -> None:
    """Batches do not wait for an env of which a rollout takes three hundred times as long, and it still has its share of them."""
    targets = {"quick": 0.9, "slow": 0.1}
    settings = make_settings(
        list(targets),
        batch_size=200,
        group_size=2,
        train={env: {"target": target} for env, target in targets.items()},
    )
    around = {
        "quick": Behaviour(latency=lambda rng: rng.expovariate(1 / 0.2)),
        "slow": Behaviour(latency=lambda rng: rng.expovariate(1 / 60.0)),
    }
    world = TestedWorld(
        settings, around, max_inflight=slots, train_s=lambda rng: 0.1, publish_every=publish_every
    )
    assert world.play(until=lambda: world.steps() >= 80)
    delivered = [group for _, _, batch in list(world.trained)[20:] for group in batch.groups]
    slow = sum(group.size for group in delivered if group.env == "slow")
    assert slow / sum(group.size for group in delivered) == pytest.approx(0.1, abs=0.015)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mix", ["even", "oldest"])
@pytest.mark.parametrize(("max_versions", "seconds"), [(0, 1.0), (2, 1.0), (2, 5.0)])
def test_an_env_in_quarantine_is_probed_and_returns_when_it_delivers_again(
    mix: str, max_versions: int, seconds: float
) -> None:
    """It has no share of the room while it is away, and others that have one do not keep it away for ever; nor does it that
    it is slower than they are, and its probes, which nobody waits for, come too late to be trained on."""
    recovers = 300.0
    around = {
        "quick": Behaviour(latency=lambda rng: rng.expovariate(1.0)),
        "back": Behaviour(latency=lambda rng: rng.expovariate(1 / seconds)),
        "slow": Behaviour(latency=lambda rng: rng.expovariate(0.2 if seconds == 1.0 else 1.0)),
    }
    settings = make_settings(
        list(around),
        batch_size=64,
        group_size=8,
        max_versions=max_versions,
        mix=mix,
        keep_equal_rewards=False,
        strategy_options={"breaker": True},
    )
    world = TestedWorld(settings, around, max_inflight=128)
    around["back"].reward = lambda rng: rng.random() if world.now > recovers else 1.0
    assert world.play(until=lambda: world.now > recovers)
    assert world.parts.mix.quarantined == {"back"}
    assert world.play(until=lambda: not world.parts.mix.quarantined or world.now > 5 * recovers)
    assert not world.parts.mix.quarantined


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_groups_of_a_size_that_divides_the_batch_are_not_split(seed: int) -> None:
    """What must leave the queue is whole groups of some envs, also where a part of a group of each would have done."""
    scenario = Scenario(
        envs=(
            Env(group_size=8, ratio=0.4, latency=0.1, spread=0.3),
            Env(group_size=8, ratio=0.3, latency=0.12, group_scored=True),
            Env(group_size=8, ratio=0.3, latency=0.3, minimum=0.1),
        ),
        batch_size=128,
        max_inflight=96,
        train_s=0.3,
        kills=(2.0, 4.0),
        seed=seed,
    )
    played = play(scenario)
    assert played.finished, played.why
    assert {group.size for batch in played.world.journal.batches for group in batch.groups} == {8}
    assert not played.world.journal.evicted


@pytest.mark.parametrize("quotas", [False, True])
def test_an_env_of_which_nothing_is_known_gets_its_chance_beside_a_minimum_or_quotas(quotas: bool) -> None:
    """With the four sequences per rollout that are guessed at first, its group would never fit beside them."""
    world = make_world(
        {"a": Behaviour(latency=lambda rng: 1.0), "b": Behaviour(latency=lambda rng: 1.0)},
        train={} if quotas else {"a": {"minimum": 0.25}},
        group_size=16,
        batch_size=64,
        max_versions=0,
        quotas=quotas,
    )
    assert world.play(until=lambda: world.steps() >= 10)
    assert sum(group.size for group in world.trained[-1][2].groups if group.env == "b") == 32
