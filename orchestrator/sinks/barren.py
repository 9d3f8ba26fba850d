"""Counts rollouts in a row that yield nothing to train on, and ends the run when there are too many. Pure.

Groups that wait without end for others that would make an exact batch with them are nothing to train on either.
Probes of an env that is quarantined do not count while another env may still deliver.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import NoReturn

from orchestrator.errors import StalledError


class Barren:
    """Rollouts since the last group that could be trained on."""

    def __init__(self, *, at_most: int, envs: Collection[str], explain: Callable[[str, str], str]) -> None:
        """`explain(env, reason)`: the reason with what the last failure of it said."""
        self._at_most = at_most
        self._envs = frozenset(envs)
        self._explain = explain
        self._rollouts = 0
        self._reasons: Counter[tuple[str, str]] = Counter()

    def _remedy(self) -> str:
        if all(reason == "equal_rewards" for _, reason in self._reasons):
            return (
                "all rewards of every group are equal, so there is nothing to learn: choose easier or harder tasks, "
                "or keep such groups with dispatch.keep_equal_rewards = true"
            )
        return "mend the environment"

    def delivered(self) -> None:
        """A group was queued."""
        self._rollouts = 0
        self._reasons.clear()

    def too_many(self, sequences: int) -> bool:
        """Whether so many queued sequences should have made a batch."""
        return sequences > self._at_most

    def give_up(self, sequences: int, why: str) -> NoReturn:
        """No batch can be made of them."""
        raise StalledError(
            f'{sequences} sequences are queued and no batch can be made: {why}; set batch.on_stuck = "split", '
            "change batch.size or group_size, or raise dispatch.max_barren_batches"
        )

    def count(self, env: str, reason: str, rollouts: int, *, ignored: Collection[str]) -> None:
        """A group ended without anything to train on; StalledError when that was one too many."""
        if env in ignored and not self._envs.issubset(ignored):
            return
        self._rollouts += rollouts
        self._reasons[env, reason] += rollouts
        if self._rollouts >= self._at_most:
            reasons = "; ".join(
                f'env "{env}": {self._explain(env, reason)} ({n} rollouts)'
                for (env, reason), n in self._reasons.most_common(4)
            )
            raise StalledError(
                f"none of the last {self._rollouts} rollouts could be trained on: {reasons}; "
                f"{self._remedy()}, or raise dispatch.max_barren_batches"
            )
