"""What the trainer reports about its own steps: numbers by name, and whether one has left its usual range.

The names are the trainer's, bounded in number. One is known here: `logprob_mismatch`, the difference between the
log-probabilities that engines returned and those that the trainer recomputes, in nats. It says whether what is trained on
is what was sampled, so a run warns of it: `IN_A_ROW` reports beyond five times the median of the last `WINDOW`, or, while
there is no usual range yet, beyond what no pair of engine and trainer shows that has the same weights. Pure.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

MISMATCH = "logprob_mismatch"
MOST_NAMES = 64
"""Names of one run; each is a label in the metrics."""
WINDOW = 50
IN_A_ROW = 3
_USUAL_AFTER = 10
"""Reports before there is a usual range."""
_FACTOR = 5.0
_FLOOR = 0.01
"""Below this a mismatch is rounding, however small it usually is."""
_UNHEARD_OF = 0.5


@dataclass(slots=True)
class Reported:
    """One name: its last values with their steps, oldest first."""

    values: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    beyond: int = 0

    @property
    def numbers(self) -> list[float]:
        """The values alone."""
        return [value for _, value in self.values]


class Reports:
    """Told what trainers report. `trouble` is what is wrong with the mismatch now, empty if nothing is."""

    def __init__(self) -> None:
        self.names: dict[str, Reported] = {}
        self.trouble = ""

    def add(self, step: int, metrics: Mapping[str, float]) -> str:
        """A step's numbers; a step that is reported again takes the place of its report. Returns why they are refused."""
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if wrong:
            return f"{', '.join(wrong)} of step {step} is not a finite number"
        fresh = metrics.keys() - self.names.keys()
        if len(self.names) + len(fresh) > MOST_NAMES:
            return f"a run has at most {MOST_NAMES} names of reported numbers; {', '.join(sorted(fresh))} would be more"
        for name, value in metrics.items():
            told = self.names.setdefault(name, Reported())
            again = bool(told.values) and told.values[-1][0] == step
            if again:
                told.values.pop()
            if name == MISMATCH:
                self._judge(told, step, abs(value), again=again)
            told.values.append((step, value))
        return ""

    def _judge(self, told: Reported, step: int, value: float, *, again: bool) -> None:
        earlier = [abs(number) for number in told.numbers]
        usual = median(earlier) if len(earlier) >= _USUAL_AFTER else None
        limit = _UNHEARD_OF if usual is None else max(_FACTOR * usual, _FLOOR)
        if value <= limit:
            told.beyond, self.trouble = 0, ""
            return
        if not again:
            told.beyond += 1
        if told.beyond >= IN_A_ROW:
            than = f"above {limit:.3g}" if usual is None else f"above {limit:.3g}, usually {usual:.3g}"
            self.trouble = f"{MISMATCH} is {value:.3g} at step {step} ({told.beyond} reports in a row {than})"

    def state_dict(self) -> dict[str, Any]:
        """For a later process of the same run."""
        return {name: [list(entry) for entry in told.values] for name, told in self.names.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier process."""
        self.names = {
            name: Reported(deque(((int(step), float(value)) for step, value in values), maxlen=WINDOW))
            for name, values in state.items()
        }
