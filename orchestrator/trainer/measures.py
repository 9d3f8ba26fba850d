"""Numbers that say whether a trainer learns from what was sampled: how old, and how far from what it computes itself.

Both give a map that `trainer.report` takes. Pure; numpy only, and whatever `numpy.asarray` takes is an array here, so
tensors in main memory too.
"""

import math
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from orchestrator.trainer.batch import TrainingBatch

_MOST = 20.0
"""Differences beyond it count as this in what is computed with `exp`, so that one odd token leaves numbers that can be read."""


def staleness(batch: TrainingBatch) -> dict[str, float]:
    """How many versions old a rank's sequences are, by the version that each was begun with.

    `staleness_spanned` is the share of sequences that may have been sampled by more than one version.
    """
    if not len(batch):
        return {}
    ages = batch.version - batch.versions
    return {
        "staleness_mean": float(ages.mean()),
        "staleness_max": float(ages.max()),
        "staleness_spanned": float((batch.versions != batch.versions_end).mean()),
    }


class LogprobMismatch:
    """How far recomputed log-probabilities are from the recorded ones, over any number of micro-batches and ranks.

    Add them before the step changes the weights. What is not finite on either side is counted, and left out of the rest.
    Ranks send theirs to each other (it can be pickled), and `of_all` is that of the whole batch.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._not_finite = 0
        self._absolute = self._highest = self._divergence = self._ratio = self._ratio_squared = 0.0

    def add(self, recomputed: Any, recorded: Any, mask: Any) -> None:
        """Arrays of one shape, as `Padded` and `Packed` have them; positions with mask 0 do not count."""
        ours, theirs, counts = (np.asarray(values) for values in (recomputed, recorded, mask))
        if not ours.shape == theirs.shape == counts.shape:
            raise ValueError(
                f"log-probabilities of shape {ours.shape} cannot be compared with recorded ones of shape {theirs.shape} "
                f"under a mask of shape {counts.shape}"
            )
        chosen = counts != 0
        difference = ours[chosen].astype(np.float64) - theirs[chosen].astype(np.float64)
        finite = np.isfinite(difference)
        self._not_finite += int(len(difference) - finite.sum())
        difference = difference[finite]
        if not len(difference):
            return
        self.tokens += len(difference)
        self._absolute += float(np.abs(difference).sum())
        self._highest = max(self._highest, float(np.abs(difference).max()))
        ratio = np.exp(np.clip(difference, -_MOST, _MOST))
        self._divergence += float((ratio - 1 - np.clip(difference, -_MOST, _MOST)).sum())
        self._ratio += float(ratio.sum())
        self._ratio_squared += float((ratio**2).sum())

    @classmethod
    def of_all(cls, found: Iterable[Self]) -> Self:
        """What several have found together, for example one of each rank."""
        total = cls()
        for one in found:
            total.tokens += one.tokens
            total._not_finite += one._not_finite
            total._absolute += one._absolute
            total._highest = max(total._highest, one._highest)
            total._divergence += one._divergence
            total._ratio += one._ratio
            total._ratio_squared += one._ratio_squared
        return total

    def metrics(self) -> dict[str, float]:
        """For `trainer.report`; empty when nothing was compared.

        `logprob_mismatch` and `_max` are of the absolute difference; `mismatch_kl` estimates the divergence of the trainer's
        policy from the one that sampled, a token; `mismatch_ess` is the share of tokens that importance weights leave effective.
        """
        if not self.tokens:
            return {"logprob_not_finite": float(self._not_finite)} if self._not_finite else {}
        found = {
            "logprob_mismatch": self._absolute / self.tokens,
            "logprob_mismatch_max": self._highest,
            "mismatch_kl": max(0.0, self._divergence / self.tokens),
            "mismatch_ratio": self._ratio / self.tokens,
            "mismatch_ess": self._ratio**2 / (self.tokens * self._ratio_squared),
        }
        if self._not_finite:
            found["logprob_not_finite"] = float(self._not_finite)
        assert all(map(math.isfinite, found.values()))
        return found
