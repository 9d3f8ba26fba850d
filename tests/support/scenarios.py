"""Random runs in virtual time: a scenario is plain values that can be printed, shrunk and replayed."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hypothesis import strategies as st

from orchestrator.curriculum import STRATEGIES, CurriculumSettings
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.ports import Rules
from orchestrator.groups.scoring import mean
from orchestrator.run.settings import BatchSettings, Limits, RunSettings, TrainEnvSettings
from orchestrator.run.status import build_status
from orchestrator.simulate.neighbours import Behaviour
from orchestrator.simulate.world import World
from tests.support.worlds import changeable

STEPS = 10


@dataclass(frozen=True)
class Env:
    """One env of a scenario; `sequences` are the numbers that a rollout may yield."""

    group_size: int = 4
    minimum: float = 0.0
    ratio: float = 1.0
    latency: float = 1.0
    spread: float = 0.5
    loss: float = 0.0
    sequences: tuple[int, ...] = (1,)
    group_scored: bool = False
    max_inflight: int | None = None
    rollouts_per_minute: float | None = None
    hangs: float = 0.0
    num_tasks: int | None = None
    curriculum: str = "uniform"


@dataclass(frozen=True)
class Scenario:
    """A configuration, and what happens to it."""

    envs: tuple[Env, ...] = (Env(),)
    batch_size: int = 16
    unit: str = "sequences"
    mix: str = "even"
    quotas: bool = False
    on_starved: str = "redistribute"
    on_stuck: str = "split"
    max_buffered: float = 8.0
    mode: str = "pace"
    max_versions: int = 2
    max_inflight: int = 64
    servers: int = 1
    capacity: int = 256
    train_s: float = 1.0
    load_s: float = 0.0
    publish_every: int = 1
    min_valid: int | None = None
    strategy: str = "flow"
    kills: tuple[float, ...] = ()
    server_deaths: tuple[float, ...] = ()
    endpoint_losses: tuple[float, ...] = ()
    commands: tuple[tuple[float, Mapping[str, Any]], ...] = ()
    """What a person says, and when."""
    seed: int = 0

    def settings(self) -> RunSettings:
        total = sum(env.ratio for env in self.envs)
        train = [
            TrainEnvSettings(
                name=f"e{number}",
                split="train",
                num_tasks=env.num_tasks,
                curriculum=CurriculumSettings(env.curriculum),
                target=env.ratio / total,
                group_size=env.group_size,
                limits=Limits(rollout_timeout_s=600.0, group_timeout_s=1800.0, max_attempts=3),
                minimum=0.0 if self.quotas else env.minimum,
                max_inflight=env.max_inflight,
                rollouts_per_minute=env.rollouts_per_minute,
            )
            for number, env in enumerate(self.envs)
        ]
        return RunSettings(
            seed=self.seed,
            max_steps=STEPS,
            batch=BatchSettings(
                size=self.batch_size,
                unit=self.unit,  # type: ignore[arg-type]  # drawn from the allowed values
                mix=self.mix,  # type: ignore[arg-type]  # same
                quotas=self.quotas,
                on_starved=self.on_starved,  # type: ignore[arg-type]  # same
                on_stuck=self.on_stuck,  # type: ignore[arg-type]  # same
                stuck_after_s=10.0,
                max_buffered=self.max_buffered,
            ),
            max_versions=self.max_versions,
            ahead=2,
            mode=self.mode,  # type: ignore[arg-type]  # same
            train=train,
            changeable=changeable(train, max_inflight=self.max_inflight),
            rules=Rules(
                backoff_s=0.5, max_backoff_s=30.0, min_valid=self.min_valid, extra_rollouts=0, ramp_s=0.0
            ),
            advantage=mean,
            keep_equal_rewards=True,
            max_barren_batches=1000,
            strategy=self.strategy,
        )

    def world(self) -> World:
        behaviours = {f"e{number}": _behaviour(env) for number, env in enumerate(self.envs)}
        world = World(
            self.settings(),
            behaviours,
            seed=self.seed,
            max_inflight=self.max_inflight,
            servers=self.servers,
            capacity=self.capacity,
            train_s=lambda rng: self.train_s * (0.5 + rng.random()),
            load_s=lambda rng: self.load_s * rng.random(),
            publish_every=self.publish_every,
        )
        names = list(behaviours)
        for time_s in self.kills:
            world.at(time_s, world.kill)
        for number, time_s in enumerate(self.server_deaths):
            env, server = names[number % len(names)], number % self.servers
            world.at(time_s, lambda env=env, server=server: world.kill_server(env, server, away_s=5.0))  # type: ignore[misc]  # binds the loop's values
        for time_s in self.endpoint_losses:
            world.at(time_s, lambda: world.lose_endpoint(away_s=7.0))
        for time_s, command in self.commands:
            world.at(time_s, partial(world.tell, command))
        return world


def _behaviour(env: Env) -> Behaviour:
    def latency(rng: random.Random) -> float:
        if rng.random() < env.hangs:
            return 1e9
        return env.latency * rng.lognormvariate(0, env.spread)

    return Behaviour(
        latency=latency,
        loss=env.loss,
        group_scored=env.group_scored,
        sequences=lambda rng: rng.choice(env.sequences),
        length=lambda rng: rng.randint(1, 6),
    )


@dataclass
class Played:
    """What became of a scenario."""

    world: World
    finished: bool
    why: str


def play(scenario: Scenario, *, limit_s: float = 3e4, max_events: int = 60_000) -> Played:
    """Run a scenario to its end, or until it is clear that it has none: no step for so long, where one slot may be all that there is."""
    world = scenario.world()
    last = (0, 0.0)

    def over() -> bool:
        nonlocal last
        check_room(world)
        if len(world.trained) > last[0]:
            last = len(world.trained), world.now
        return bool(world.ended) or world.now > last[1] + limit_s

    finished = world.play(until=over, max_events=max_events)
    done = finished and bool(world.ended)
    why = "" if done else explain(world)
    return Played(world, done, why)


def check_room(world: World) -> None:
    """No server has more requests than it takes; a single one may be larger than its room."""
    for env in world.envs.values():
        for server in env._servers:
            sent = len(server.requests)
            assert sent <= max(1, server.capacity), f"{sent} requests on a server for {server.capacity}"


def explain(world: World) -> str:
    """What the run itself says of why it does not go on."""
    status = build_status(world.run, world.now)
    return f"t={world.now:.1f} step {status.step} trained {status.trained}: {status.waiting_for} | {status.buffer} | queued {dict(world.run.parts.sink.queued())} coming {dict(world.run.parts.pace.coming)} inflight {status.inflight}"


def check(scenario: Scenario, played: Played) -> None:
    """Everything that must hold of a finished run."""
    world = played.world
    assert played.finished, f"no progress: {played.why}"
    steps = [step for step, _, _ in world.trained]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    seen: dict[int, tuple[str, ...]] = {}
    trained: Counter[str] = Counter()
    for step, version, batch in world.trained:
        ids = tuple(group.id for group in batch.groups)
        assert seen.setdefault(step, ids) == ids, "a step that was served again is the same"
        if scenario.unit == "sequences":
            assert batch.size == scenario.batch_size
        else:
            assert sum(len(group.tokens) for group in batch.groups) <= scenario.batch_size
        for group in batch.groups:
            assert world.run.parts.versions.max_versions >= 0
            ordinal = version // scenario.publish_every - group.version // scenario.publish_every
            assert ordinal <= scenario.max_versions, f"step {step} has a group {ordinal} versions old"
    for ids in seen.values():
        trained.update(ids)
    assert max(trained.values()) == 1, "a group is trained on once"
    check_choices(world)
    if scenario.unit == "sequences" and not scenario.kills and not world.run.minimums.times_waived:
        for env, least in world.run.parts.buffer.configured_minimums.items():
            for step, _, batch in world.trained:
                has = sum(group.size for group in batch.groups if group.env == env)
                assert has >= least, f"step {step} has {has} of the minimum of {least} of {env}"


def check_choices(world: World) -> None:
    """A position stands for one task, however often it is asked, and whatever has died in between."""
    tasks: dict[str, int] = {}
    for attempt in world.starts:
        if attempt.group.lane is Lane.TRAIN:
            task = attempt.group.task
            assert tasks.setdefault(task.key, task.index) == task.index, f"{task.key} is another task now"
    source = world.run.parts.source
    for env in world.settings.train:
        told = len(world.journal.learned.get(env.name, ()))
        if env.num_tasks is not None:
            assert int(source.statistics(env.name).groups.sum()) == told, (
                "the statistics are those of the journal"
            )


def thrown_away(played: Played) -> list[str]:
    """Finished groups that became too old under pace; less than a group over a batch is no waste."""
    return [group.id for group, reason in played.world.journal.evicted if reason == "stale"]


def _env(draw: st.DrawFn, batch_size: int) -> Env:
    sequences = draw(st.sampled_from([(1,), (1,), (1,), (1, 2), (1, 2, 3), (2,), (1, 2, 3, 4)]))
    largest = max(1, batch_size // max(sequences))
    group_size = draw(st.integers(1, min(8, largest)))
    return Env(
        group_size=group_size,
        minimum=draw(st.sampled_from([0.0, 0.0, 0.1, 0.2, 0.25, 0.4])),
        ratio=draw(st.sampled_from([1.0, 1.0, 0.2, 3.0])),
        latency=draw(st.sampled_from([0.05, 1.0, 1.0, 8.0])),
        spread=draw(st.sampled_from([0.0, 0.5, 1.0])),
        # A strict group survives only if all its members do.
        loss=draw(st.sampled_from([0.0, 0.0, 0.05, 0.2, 0.8 if group_size == 1 else 0.3])),
        sequences=sequences,
        group_scored=draw(st.booleans()),
        max_inflight=draw(st.sampled_from([None, None, None, 4, 16])),
        rollouts_per_minute=draw(st.sampled_from([None, None, None, 60.0, 600.0])),
    )


def commands(names: Sequence[str]) -> st.SearchStrategy[Mapping[str, Any]]:
    """Anything that a person may say, sensible or not."""
    env = st.sampled_from([*names, "nobody"])
    ratio = st.sampled_from([0.0, 0.2, 1.0, 3.0, -1.0])
    urls = st.sampled_from([f"http://virtual{number}/v1" for number in ("", 1, 2)])
    return st.one_of(
        st.sampled_from(["pause", "pause", "resume"]).map(lambda name: {"command": name}),
        st.dictionaries(env, ratio, min_size=1).map(lambda envs: {"command": "ratio", "envs": envs}),
        env.map(lambda name: {"command": "quarantine", "env": name}),
        env.map(lambda name: {"command": "restore", "env": name}),
        st.just({"command": "eval"}),
        st.sampled_from([0, 1, 4, 64, 200]).map(lambda n: {"command": "max-inflight", "value": n}),
        st.tuples(st.sampled_from(["add", "remove"]), urls).map(
            lambda asked: {"command": "endpoint", "action": asked[0], "url": asked[1]}
        ),
    )


@st.composite
def steered(draw: st.DrawFn) -> Scenario:
    """Any run with a person who keeps changing it; at the end of all that, it is not paused."""
    scenario = draw(scenarios())
    names = [f"e{number}" for number in range(len(scenario.envs))]
    times = st.floats(0.0, 15.0).map(lambda x: round(x, 1))
    said = draw(st.lists(st.tuples(times, commands(names)), max_size=12))
    return replace(scenario, commands=(*said, (90.0, {"command": "resume"})))


@st.composite
def scenarios(draw: st.DrawFn, /, **fixed: Any) -> Scenario:
    """Any configuration that the check accepts, with any weather."""
    batch_size = draw(st.sampled_from([8, 12, 16, 24, 32, 64]))
    envs = tuple(_env(draw, batch_size) for _ in range(draw(st.integers(1, 3))))
    if sum(env.minimum for env in envs) > 0.9:
        envs = tuple(Env(**{**env.__dict__, "minimum": 0.0}) for env in envs)
    unit = draw(st.sampled_from(["sequences", "sequences", "sequences", "tokens"]))
    quotas = unit == "sequences" and draw(st.integers(0, 4)) == 0
    times = st.lists(st.floats(0.1, 60.0).map(lambda x: round(x, 1)), max_size=3).map(tuple)
    fields: dict[str, Any] = {
        "envs": envs,
        "batch_size": batch_size if unit == "sequences" else batch_size * 20,
        "unit": unit,
        "mix": draw(st.sampled_from(["even", "oldest"])),
        "quotas": quotas,
        "on_starved": draw(st.sampled_from(["redistribute", "wait"])) if quotas else "redistribute",
        "max_buffered": draw(st.sampled_from([1.0, 1.5, 8.0])),
        "mode": draw(st.sampled_from(["pace", "pace", "drop"])),
        "max_versions": draw(st.integers(0, 4)),
        "max_inflight": draw(st.sampled_from([4, 16, 64, 200])),
        "servers": draw(st.integers(1, 3)),
        "capacity": draw(st.sampled_from([8, 32, 256])),
        "train_s": draw(st.sampled_from([0.0, 0.1, 1.0, 20.0])),
        "load_s": draw(st.sampled_from([0.0, 0.0, 2.0, 10.0])),
        "publish_every": draw(st.sampled_from([1, 1, 1, 3])),
        "kills": draw(times) if draw(st.booleans()) else (),
        "server_deaths": draw(times) if draw(st.booleans()) else (),
        "endpoint_losses": draw(times) if draw(st.integers(0, 3)) == 0 else (),
        "seed": draw(st.integers(0, 1000)),
    }
    scenario = Scenario(**(fields | fixed))
    # Drawn last, so that what is drawn before stays what it was.
    curricula = st.sampled_from(["uniform", *STRATEGIES])
    numbers = st.sampled_from([None, 1, 7, 1000])
    chosen = [replace(env, curriculum=draw(curricula), num_tasks=draw(numbers)) for env in scenario.envs]
    return replace(scenario, envs=tuple(chosen))
