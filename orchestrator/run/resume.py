"""How a run goes on where an earlier process of it ended.

What is formed stays formed, what is queued stays queued, and a task that was handed out and has no group is asked again.
Everything is derived from what the journal holds; nothing else is set, so no order of calls can leave a part behind.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from orchestrator.curriculum import Outcomes
from orchestrator.facts import StepRecord
from orchestrator.groups.group import Batch, Group
from orchestrator.run.run import Run

log = structlog.get_logger()


class Recovery(Protocol):
    """What a journal holds of an earlier process."""

    @property
    def groups(self) -> Sequence[Group]:
        """Finished and in no batch, in the order of recording."""

    @property
    def batches(self) -> Sequence[Batch]:
        """Formed, and needed or kept."""

    @property
    def resolved(self) -> Mapping[str, tuple[int, Sequence[int]]]:
        """Per env, the position below which everything is resolved, and the resolved ones above it."""

    @property
    def chosen(self) -> Mapping[str, Mapping[int, int]]:
        """Per env, the tasks that a curriculum chose, by position."""

    @property
    def learned(self) -> Mapping[str, Outcomes]:
        """Per env, what groups said about their tasks, in the order of recording."""

    @property
    def state(self) -> Mapping[str, Any]: ...
    @property
    def last_step(self) -> int: ...
    @property
    def last_acknowledged(self) -> int: ...
    @property
    def steps(self) -> Sequence[StepRecord]:
        """The last steps."""

    @property
    def damaged(self) -> Sequence[str]: ...
    @property
    def empty(self) -> bool: ...


class JournaledWeights:
    """What the journal says about versions: those published, the last one loaded, and where each lies."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state.get("version", {"published": [0], "path": None, "trained": 0}))
        self.published: int = self.state["published"][-1]
        # Journals of earlier revisions know only the published one, and took it for loaded.
        self.loaded: int = self.state.setdefault("serving", self.published)
        self.path: str | None = self.state["path"]
        self.loaded_path: str | None = self.state.get("loaded_path", self.path)
        self.trained: int = self.state["trained"]

    @property
    def begins(self) -> bool:
        """Whether nothing was published yet, not even version 0."""
        return self.published == 0 and self.path is None

    def begin_with(self, path: str | None) -> None:
        """Version 0 lies at `path`; one that was published or begun with earlier stays."""
        if self.published == 0:
            self.path = self.loaded_path = self.loaded_path or self.path or path


def resume(
    run: Run, recovered: Recovery, weights: JournaledWeights, evals: Iterable[Mapping[str, Any]]
) -> None:
    """Continue where an earlier process of the run ended; before `Run.start`."""
    parts = run.parts
    # A version is published before its step is acknowledged, so more steps may be trained on than acknowledged.
    trained = max(recovered.last_acknowledged, min(weights.trained, recovered.last_step))
    parts.versions.load_state_dict(weights.state, formed=recovered.last_step, trained=trained)
    run.acknowledged = recovered.last_acknowledged
    run.weights.path, run.weights.loaded_path = weights.path, weights.loaded_path
    parts.eval_sink.load({key: row[key] for key in row if key != "at"} for row in evals)
    if recovered.empty:
        return
    _restore(run, recovered.state)
    parts.facts.history.extend(recovered.steps)
    held: dict[str, set[int]] = {}
    for group in recovered.groups:
        held.setdefault(group.env, set()).add(group.task.position)
    asked_again = 0
    for env in parts.train:
        low, resolved = recovered.resolved.get(env, (0, []))
        chosen = recovered.chosen.get(env, {})
        asked_again += parts.source.load_resolved(env, low, resolved, held.get(env, ()), chosen)
        if env in recovered.learned:
            parts.source.load_outcomes(env, recovered.learned[env])
    for env in recovered.resolved.keys() - parts.train.keys():
        log.warning("env.gone", env=env, note="it was in an earlier process of this run")
    for batch in recovered.batches:
        parts.sink.remember(batch.groups)
    kept = parts.sink.restore(recovered.groups)
    log.info(
        "run.resumed",
        step=recovered.last_step,
        acknowledged=recovered.last_acknowledged,
        version=parts.versions.published,
        groups=kept,
        tasks_asked_again=asked_again,
        damaged=len(recovered.damaged),
    )


def _restore(run: Run, state: Mapping[str, Any]) -> None:
    """Give the parts what `Run.states` had of them; the mix says what changed in the configuration meanwhile."""
    parts = run.parts
    run.control.restore(state.get("control"))
    if "mix" in state:
        for note in parts.mix.load_state_dict(state["mix"]):
            log.warning("mix.changed", note=note)
        parts.mix.forget_inflight()
    for key, part in (
        ("facts", parts.facts),
        ("ledger", parts.ledger),
        ("evals", parts.evaluations),
        ("buffer", parts.buffer),
    ):
        if key in state:
            part.load_state_dict(state[key])
