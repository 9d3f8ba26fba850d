"""Time that a rollout spends outside of the model: tools, sandboxes, judges.

Log-normal, as such times are: most are near the median, a few take several times as long. Seeded by the task,
so that two runs see the same times.
"""

import asyncio
import math
import random


class Latency:
    """Waits with the median `median_s`; `spread` is the standard deviation of their logarithm."""

    def __init__(self, median_s: float, spread: float = 0.5) -> None:
        if median_s < 0 or spread < 0:
            raise ValueError(
                f"latency_s and latency_spread must not be negative, got {median_s} and {spread}"
            )
        self.median_s = median_s
        self.spread = spread

    def draw_s(self, seed: str) -> float:
        """The time of one wait."""
        return self.median_s * math.exp(random.Random(seed).gauss(0.0, self.spread))

    async def wait(self, seed: str) -> None:
        """Spend it; without a latency nothing is waited for."""
        if self.median_s:
            await asyncio.sleep(self.draw_s(seed))
