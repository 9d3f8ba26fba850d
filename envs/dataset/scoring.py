"""What a scorer is, and which there are.

A scorer is made once per environment, from a name or a table of the configuration; its constructor's type hints say
what the table may hold. It says which columns it needs and what is wrong with a row before anything runs, and
later what a reply is worth. What it raises while scoring is a failed rollout, never a reward of zero.
Scorers are imported when a configuration names them, so that a library of one of them is needed by nobody else.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from envs.dataset.rows import Row
from envs.errors import EnvironmentLoadError
from envs.importing import import_attribute, nearest
from envs.signatures import ArgumentsError, Signature

SCORERS: Mapping[str, str] = {
    "exact": "envs.dataset.answers:Exact",
    "numeric": "envs.dataset.answers:Numeric",
    "regex": "envs.dataset.patterns:Regex",
    "choice": "envs.dataset.choice:Choice",
    "math": "envs.dataset.patterns:MathEquivalence",
    "json_schema": "envs.dataset.json_schema:JsonSchema",
    "unit_tests": "envs.dataset.unit_tests:UnitTests",
    "judge": "envs.dataset.judge:Judge",
}
"""Name → "module:Class"; a scorer of your own is named by its "module:Class"."""


class Score(NamedTuple):
    """What a reply is worth, and numbers beside it. `answered` is False where there was nothing to score."""

    reward: float
    answered: bool = True
    metrics: Mapping[str, float] = {}


NO_ANSWER = Score(0.0, answered=False)


class Scorer(ABC):
    """One way to score. `columns` are those that every row must have."""

    columns: list[str]

    def check(self, row: Row) -> str:
        """What is wrong with a row that has all columns; empty when nothing is."""
        return ""

    @abstractmethod
    async def score(self, reply: str, row: Row) -> Score:
        """What a reply is worth."""

    async def setup(self) -> None:  # noqa: B027  most scorers have nothing to open
        """Open what scoring needs."""

    async def close(self) -> None:  # noqa: B027  nor to close
        """Give back what `setup` took."""


def build_scorer(named: str | Mapping[str, Any], *, shown: str) -> Scorer:
    """The scorer that a configuration asks for: its name, or a table with `name` and its options."""
    options = {"name": named} if isinstance(named, str) else dict(named)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise EnvironmentLoadError(f"{shown}: scorer has no name; there are: {', '.join(SCORERS)}")
    if name not in SCORERS and ":" not in name:
        raise EnvironmentLoadError(f'{shown}: there is no scorer "{name}"; {nearest(name, SCORERS)}')
    try:
        found = import_attribute(SCORERS.get(name, name), what="scorer")
    except ValueError as error:
        raise EnvironmentLoadError(f"{shown}: {error}") from error.__cause__
    if not isinstance(found, type) or not issubclass(found, Scorer):
        raise EnvironmentLoadError(f'{shown}: "{name}" is not a subclass of envs.dataset.Scorer')
    signature = Signature(found)
    unknown = next((option for option in options if option not in signature.names), None)
    if unknown is not None:
        raise EnvironmentLoadError(
            f'{shown}: scorer "{name}" has no option "{unknown}"; {nearest(unknown, signature.names)}'
        )
    try:
        return found(**signature.read(options))
    except (ArgumentsError, ValueError) as error:
        raise EnvironmentLoadError(f'{shown}: scorer "{name}": {error}') from None
