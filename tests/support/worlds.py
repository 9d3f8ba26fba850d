"""Runs in virtual time for tests: `orchestrator.simulate.world.World` with settings that a test names one by one.

Nothing is joined here: the parts are those of `build_run`. After every turn the ledger must balance.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envs.wire import Failure, Result, RolloutHeader
from orchestrator.dispatch.ledger import Lane, Ledger
from orchestrator.dispatch.ports import Rules
from orchestrator.dispatch.waits import Wait, WaitKind
from orchestrator.dispatch.work import Attempt, PendingGroup
from orchestrator.groups.scoring import mean
from orchestrator.mix import EnvShare, mix_targets
from orchestrator.run.parts import Parts
from orchestrator.run.settings import (
    BatchSettings,
    Changeable,
    EvalEnvSettings,
    Limits,
    RunSettings,
    TrainEnvSettings,
)
from orchestrator.run.waits import find_waits
from orchestrator.simulate.neighbours import Behaviour
from orchestrator.simulate.world import World
from orchestrator.tasks.evaluations import EvalPlan
from orchestrator.tasks.task import TrainTask

NEVER = 1e12
"""A latency after which nothing ends by itself: tests end attempts by hand."""

_BATCH: dict[str, Any] = {
    "unit": "sequences",
    "mix": "even",
    "quotas": False,
    "on_starved": "redistribute",
    "on_stuck": "split",
    "stuck_after_s": 10.0,
    "max_buffered": 8.0,
}
_LIMITS: dict[str, Any] = {"rollout_timeout_s": 1e6, "group_timeout_s": 1e7, "max_attempts": 3}
_RULES: dict[str, Any] = {
    "backoff_s": 0.1,
    "max_backoff_s": 1.0,
    "min_valid": None,
    "extra_rollouts": 0,
    "ramp_s": 0.0,
}
_RUN: dict[str, Any] = {
    "seed": 0,
    "max_steps": None,
    "max_versions": 2,
    "ahead": 2,
    "mode": "pace",
    "advantage": mean,
    "keep_equal_rewards": True,
    "max_barren_batches": 1000,
    "strategy": "flow",
    "strategy_options": {"breaker": False},
}


def _taken(options: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults, with what a test says instead of them; what is used is taken out of the options."""
    return {name: options.pop(name, value) for name, value in defaults.items()}


def changeable(train: Sequence[TrainEnvSettings], *, max_inflight: int = 64) -> Changeable:
    """What a configuration of these envs would say: their targets are their ratios."""

    def targets(ratios: Mapping[str, float]) -> dict[str, float]:
        shares = [
            EnvShare(env.name, ratios.get(env.name, env.target), None, env.minimum, env.group_size)
            for env in train
        ]
        return dict(zip((env.name for env in train), mix_targets(shares), strict=True))

    return Changeable(
        ratios={env.name: env.target for env in train},
        targets=targets,
        max_inflight=max_inflight,
        endpoints=["http://virtual/v1"],
        sourced=False,
    )


def make_settings(
    names: Sequence[str],
    *,
    batch_size: int = 16,
    group_size: int = 4,
    train: Mapping[str, Mapping[str, Any]] | None = None,
    evals: Sequence[EvalPlan] = (),
    **options: Any,
) -> RunSettings:
    """A run of these envs; `train` has what is special about an env, `options` what is about the run."""
    limits = Limits(**_taken(options, _LIMITS))
    batch = BatchSettings(size=batch_size, **_taken(options, _BATCH))
    rules = Rules(**_taken(options, _RULES))
    whole = _taken(options, _RUN)
    assert not options, f"unknown options: {sorted(options)}"
    plain = {
        "split": "train",
        "num_tasks": None,
        "target": 1 / len(names),
        "group_size": group_size,
        "limits": limits,
    }
    envs = [TrainEnvSettings(name=name, **{**plain, **(train or {}).get(name, {})}) for name in names]
    return RunSettings(
        batch=batch,
        rules=rules,
        train=envs,
        changeable=changeable(envs),
        evals=[EvalEnvSettings(plan=plan, limits=limits) for plan in evals],
        **whole,
    )


class TestedWorld(World):
    """A world whose ledger balances after every turn, with short names for what tests look at."""

    __test__ = False

    def turn(self) -> None:
        super().turn()
        assert self.ledger.balances()
        assert sum(one.inflight for one in self.pool.endpoints) == self.ledger.total_inflight
        assert all(server.inflight >= 0 for env in self.envs.values() for server in env._servers)

    @property
    def parts(self) -> Parts:
        return self.run.parts

    @property
    def ledger(self) -> Ledger:
        return self.run.parts.ledger

    @property
    def eval_results(self) -> list[dict[str, Any]]:
        return self.run.parts.eval_sink.results

    def steps(self) -> int:
        """Batches that were trained on."""
        return len(self.trained)

    def ages(self) -> Counter[int]:
        """Age in versions of every sequence that was trained on."""
        ages: Counter[int] = Counter()
        for _, version, batch in self.trained:
            for group in batch.groups:
                ages[version - group.version] += group.size
        return ages

    def wait(self, kind: WaitKind) -> Wait | None:
        """What the run says about this kind of wait, if it says anything."""
        return next((wait for wait in find_waits(self.run, self.now) if wait.kind is kind), None)

    def open_groups(self, lane: Lane = Lane.TRAIN) -> list[PendingGroup]:
        return list(self.parts.dispatcher.flight.groups(lane))

    def finish(self, attempt: Attempt, rewards: Sequence[float] = (1.0,)) -> None:
        """An attempt brings these rewards back, one for each rollout."""
        self._leave(attempt)
        self.run.on_result(attempt, make_data(list(rewards)), self.now)
        self._perform()

    def fail(self, attempt: Attempt, kind: str = "http", *, retryable: bool, together: int = 0) -> None:
        """An attempt fails; `together` above 0: its server died with that many requests on it."""
        self._leave(attempt)
        failure = Failure(0, kind, "it failed", retryable=retryable)
        self.run.on_failure(attempt, failure, self.now, together=together)
        self._perform()

    def finish_group(self, group: PendingGroup) -> None:
        """Every attempt of a group that is under way brings a reward back."""
        for number, attempt in enumerate(list(group.running)):
            self.finish(attempt, [float(number + n) for n in range(attempt.count)])

    def _leave(self, attempt: Attempt) -> None:
        self.envs[attempt.group.env].release(attempt.server, attempt)


def make_world(behaviours: Mapping[str, Behaviour], **options: Any) -> TestedWorld:
    """A world around a run of these envs; envs that only `evals` name are not trained on."""
    world = {
        name: options.pop(name)
        for name in ("max_inflight", "servers", "capacity", "train_s", "load_s", "publish_every", "archive")
        if name in options
    }
    for name in ("train_s", "load_s"):
        if name in world and not callable(world[name]):
            world[name] = lambda rng, seconds=world[name]: seconds
    tested = {plan.env for plan in options.get("evals", ())}
    settings = make_settings([name for name in behaviours if name not in tested], **options)
    return TestedWorld(settings, behaviours, seed=settings.seed, **world)


def quiet(**options: Any) -> TestedWorld:
    """One env of groups of 4 in which nothing ends by itself, with batches of 8 and room for many of them."""
    defaults = {"max_inflight": 8, "batch_size": 8, "max_versions": 9}
    return make_world({"a": Behaviour(latency=lambda rng: NEVER)}, **{**defaults, **options})


def make_data(rewards: list[float], length: int = 3) -> Result:
    """What came back: one short sequence per rollout."""
    n = len(rewards)
    return Result(
        id=0,
        rollouts=[RolloutHeader(reward, [length], "stop", False, {}, {}) for reward in rewards],
        tokens=np.arange(n * length, dtype=np.int32),
        mask=np.ones(n * length, dtype=np.uint8),
        logprobs=np.zeros(n * length, dtype=np.float32),
        transcript=b"\x90",
    )


def make_pending(
    position: int, rewards: list[float], *, env: str = "a", version: int = 0, opened: float = 0.0
) -> PendingGroup:
    """A group that has its rollouts."""
    task = TrainTask(env=env, split="train", index=position, epoch=0, position=position)
    group = PendingGroup(
        task=task,
        lane=Lane.TRAIN,
        size=len(rewards),
        needed=1,
        group_scored=False,
        version=version,
        opened=opened,
    )
    group.results.append(make_data(rewards))
    group.valid = len(rewards)
    return group
