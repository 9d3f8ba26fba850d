"""What may take for ever on the wrong text, and therefore runs aside: regular expressions, mathematics.

A reply that is not scored in time is worth nothing, and the metric `timed_out` is 1. The library of mathematics,
math-verify, is an extra; it finds the answer in the reply itself, in \\boxed{…} or at its end.
"""

import importlib.util
import os
import re
from typing import Any

from envs.dataset.aside import Aside
from envs.dataset.rows import Row
from envs.dataset.scoring import NO_ANSWER, Score, Scorer
from envs.dataset.template import find

INSTALL = "pip install 'rollout-orchestrator[math]'"
_LATE = Score(0.0, metrics={"timed_out": 1.0})
_LONGEST_SEARCH_S = 5.0


class ReplyPattern:
    """Takes the answer out of a reply: the last match of a pattern, or its group. ValueError for what is no such pattern."""

    def __init__(self, pattern: str) -> None:
        try:
            groups = re.compile(pattern, re.DOTALL).groups
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        if groups > 1:
            raise ValueError(f"has {groups} groups; one at most")
        self._pattern = pattern
        self._aside = Aside(
            "envs.dataset.patterns:last_match", most=os.cpu_count() or 1, timeout_s=_LONGEST_SEARCH_S
        )

    async def last_in(self, reply: str) -> str | None:
        """The answer, None where there is none; TimeoutError when the search takes too long."""
        found: str | None = await self._aside.call(self._pattern, reply)
        return found

    async def aclose(self) -> None:
        """End the helpers."""
        await self._aside.aclose()


class Regex(Scorer):
    """The reply matches: one `pattern` for all rows, or a `column` with each row's own; `full` wants all of the reply."""

    def __init__(
        self, pattern: str = "", column: str = "", full: bool = False, timeout_s: float = 5.0
    ) -> None:
        if bool(pattern) == bool(column):
            raise ValueError("give either pattern or column")
        if pattern and (problem := _pattern_problem(pattern)):
            raise ValueError(problem)
        self.columns = [column] if column else []
        self._column = column
        self._pattern = pattern
        self._full = full
        self._aside = Aside("envs.dataset.patterns:matches", most=os.cpu_count() or 1, timeout_s=timeout_s)

    def check(self, row: Row) -> str:
        problem = _pattern_problem(find(row, self._column)) if self._column else ""
        return f'column "{self._column}": {problem}' if problem else ""

    async def score(self, reply: str, row: Row) -> Score:
        pattern = find(row, self._column) if self._column else self._pattern
        try:
            return Score(
                float(await self._aside.call(pattern, reply, self._full)), metrics={"timed_out": 0.0}
            )
        except TimeoutError:
            return _LATE

    async def close(self) -> None:
        await self._aside.aclose()


class MathEquivalence(Scorer):
    """The reply is mathematically the same as the answer, by math-verify; text without LaTeX marks is understood too."""

    def __init__(self, answer: str = "answer", timeout_s: float = 10.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(f"math-verify is not installed for this interpreter; {INSTALL}")
        self.columns = [answer]
        self._answer = answer
        self._aside = Aside(
            "envs.adapters.math_verify:are_equal", most=os.cpu_count() or 1, timeout_s=timeout_s
        )

    def check(self, row: Row) -> str:
        answer = find(row, self._answer)
        usable = (
            isinstance(answer, (str, int, float)) and not isinstance(answer, bool) and str(answer).strip()
        )
        return "" if usable else f'column "{self._answer}" is neither a text nor a number'

    async def setup(self) -> None:
        """Start a first helper, which imports the library."""
        await self._aside.call("1", "1")

    async def score(self, reply: str, row: Row) -> Score:
        try:
            equal = await self._aside.call(str(find(row, self._answer)), reply)
        except TimeoutError:
            return _LATE
        if equal is None:
            return NO_ANSWER
        return Score(float(equal), metrics={"timed_out": 0.0})

    async def close(self) -> None:
        await self._aside.aclose()


def last_match(pattern: str, reply: str) -> str | None:
    """The last match of a pattern, or of its group where it has one. Runs aside."""
    last = None
    for found in re.finditer(pattern, reply, re.DOTALL):
        last = found
    return None if last is None else last[last.re.groups]


def matches(pattern: str, reply: str, full: bool) -> bool:
    """Whether a pattern is found in a reply, or is all of it. Runs aside."""
    found = re.fullmatch(pattern, reply.strip()) if full else re.search(pattern, reply)
    return found is not None


def _pattern_problem(pattern: Any) -> str:
    if not isinstance(pattern, str):
        return "a pattern is a text"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f'"{pattern:.60}" is not a regular expression: {error}'
    return ""
