"""What a run left for a simulation: read from its journal and its archive, with connections that can change nothing.

Only whole groups that were scored say how groups go: trained on, queued, or dropped although every rollout came back. Of a
group that failed, or that lives with fewer rollouts than it asked for, there are not all.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from orchestrator.archive import RolloutReader
from orchestrator.archive.records import QUEUED, TRAINED
from orchestrator.curriculum import Outcomes
from orchestrator.errors import ConfigError
from orchestrator.journal import JournalReader
from orchestrator.journal.identity import identity_from_meta
from orchestrator.journal.payloads import DamagedPayloadError
from orchestrator.simulate.answers import FINISHED
from orchestrator.simulate.behaviour import Members
from orchestrator.simulate.recorded import Recording

MOST_GROUPS = 20_000
"""Of the newest; more would say the same."""

WHOLE = frozenset((TRAINED, QUEUED, *FINISHED)) - {"task_mismatch"}
"""Outcomes of groups whose rollouts all came back, and answered one question."""


def read_recording(run_dir: Path) -> Recording:
    """The records of a run; ConfigError where there is no run, or none that has formed two batches."""
    groups, archived = _read_groups(run_dir)
    with JournalReader(run_dir) as journal:
        steps = journal.steps()
        sequences = _read_sequences(journal)
        # Without an archive only groups that are trained on are there, none of which has equal rewards.
        equal = {} if archived else _equal_shares(journal.learned())
        identity = identity_from_meta(journal.meta())
    if len(steps) < 2:
        raise ConfigError(
            f"{run_dir}: the run has formed {len(steps)} batch(es); --from needs one with at least 2"
        )
    return Recording(
        steps=steps,
        groups=groups,
        sequences=sequences,
        tasks={name: env.num_tasks for name, env in identity.envs.items()},
        equal=equal,
    )


def _read_groups(run_dir: Path) -> tuple[dict[str, list[Members]], bool]:
    """Whole groups by env, and whether they come from an archive."""
    found: dict[str, list[Members]] = {}
    with RolloutReader(run_dir) as rollouts:
        for group in rollouts.groups(split="train", texts=False, limit=MOST_GROUPS):
            if group.outcome in WHOLE and group.rollouts:
                members = [(float(rollout.reward), max(1, rollout.tokens)) for rollout in group.rollouts]
                found.setdefault(group.env, []).append(members)
        archived = rollouts.archived
    for env, groups in found.items():
        size = max(map(len, groups))
        found[env] = [group for group in groups if len(group) == size]
    return found, archived


def _read_sequences(journal: JournalReader) -> dict[str, list[float]]:
    """Per env, how many sequences each rollout had, of the groups that the journal still has."""
    rows = list(journal.group_rows())
    split = {(row.task.env, row.task.position) for row in rows if row.part}
    found: dict[str, list[float]] = {}
    for row in rows:
        if not row.rollouts or (row.task.env, row.task.position) in split:
            continue
        counts = [row.sequences / row.rollouts] * row.rollouts
        if row.sequences != row.rollouts:
            try:
                of_each = np.bincount(journal.group(row).facts["rollout"])
                counts = [float(n) for n in of_each if n]
            except DamagedPayloadError:
                pass  # a running orchestrator has just given it back: the mean of the group is known
        found.setdefault(row.task.env, []).extend(counts)
    return found


def _equal_shares(learned: Mapping[str, Outcomes]) -> dict[str, float]:
    """Per env, the share of all groups that ended with rewards whose rewards were all equal."""
    return {env: float(outcomes["equal"].mean()) for env, outcomes in learned.items() if len(outcomes)}
