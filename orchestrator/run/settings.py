"""What a run is told: plain values, made from a configuration by the service, or by hand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from orchestrator.curriculum import UNIFORM, CurriculumSettings
from orchestrator.dispatch.pace import Mode
from orchestrator.dispatch.ports import Rules
from orchestrator.groups.scoring import AdvantageFunction
from orchestrator.tasks.evaluations import EvalPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an attempt and a group of an env may take."""

    rollout_timeout_s: float
    group_timeout_s: float
    max_attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEnvSettings:
    """One training env. `target` is its share of the mix, `minimum` the least share of every batch, `domain` what it
    counts towards in the status (its own name when empty)."""

    name: str
    split: str
    num_tasks: int | None
    target: float
    group_size: int
    limits: Limits
    domain: str = ""
    minimum: float | Fraction = 0.0
    on_unmet_minimum: Literal["waive", "wait"] = "waive"
    max_inflight: int | None = None
    rollouts_per_minute: float | None = None
    curriculum: CurriculumSettings = UNIFORM


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalEnvSettings:
    """One evaluation env."""

    plan: EvalPlan
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What a batch is; see the configuration reference for each field."""

    size: int
    unit: Literal["sequences", "tokens"]
    mix: Literal["even", "oldest"]
    quotas: bool
    on_starved: Literal["redistribute", "wait"]
    on_stuck: Literal["wait", "split"]
    stuck_after_s: float
    max_buffered: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Changeable:
    """What the configuration says of all that can be changed while the run goes on.

    `targets` are those of all envs when some have other ratios than configured; ConfigError where that makes no mix.
    """

    ratios: Mapping[str, float | None]
    targets: Callable[[Mapping[str, float]], Mapping[str, float]]
    max_inflight: int
    endpoints: Sequence[str]
    sourced: bool
    """Whether sources name further endpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """A whole run."""

    seed: int
    max_steps: int | None
    batch: BatchSettings
    max_versions: int
    ahead: int
    """Batches that may be formed and not trained on."""
    mode: Mode
    train: Sequence[TrainEnvSettings]
    rules: Rules
    advantage: AdvantageFunction
    keep_equal_rewards: bool
    max_barren_batches: int
    strategy: str
    changeable: Changeable
    evals: Sequence[EvalEnvSettings] = ()
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
