"""Scorers that compare the reply with the right answer: as text, or as a number. Pure."""

import re
from fractions import Fraction
from typing import Any

from envs.dataset.rows import Row
from envs.dataset.scoring import NO_ANSWER, Score, Scorer
from envs.dataset.template import find

_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?:\s?/\s?\d+(?![\d.]))?"
)
_MOST_DIGITS = 400


class Exact(Scorer):
    """The reply is the answer, but for space around it; a list of answers accepts each of them."""

    def __init__(self, answer: str = "answer", ignore_case: bool = False, ignore_space: bool = False) -> None:
        self.columns = [answer]
        self._answer = answer
        self._ignore_case = ignore_case
        self._ignore_space = ignore_space

    def check(self, row: Row) -> str:
        accepted = self._accepted(row)
        if not accepted or not all(isinstance(each, (str, int, float)) for each in accepted):
            return f'column "{self._answer}" is neither a text, a number nor a list of them'
        return ""

    async def score(self, reply: str, row: Row) -> Score:
        accepted = {self._plain(str(each)) for each in self._accepted(row)}
        return Score(float(self._plain(reply) in accepted), answered=bool(reply.strip()))

    def _accepted(self, row: Row) -> list[Any]:
        answer = find(row, self._answer)
        return answer if isinstance(answer, list) else [answer]

    def _plain(self, text: str) -> str:
        text = "".join(text.split()) if self._ignore_space else text.strip()
        return text.casefold() if self._ignore_case else text


class Numeric(Scorer):
    """The last number of the reply is that of the answer, within a tolerance; fractions and 1,234.5 are numbers too."""

    def __init__(
        self, answer: str = "answer", tolerance: float = 0.0, relative_tolerance: float = 0.0
    ) -> None:
        if tolerance < 0 or relative_tolerance < 0:
            raise ValueError("a tolerance must not be negative")
        self.columns = [answer]
        self._answer = answer
        self._tolerance = Fraction(tolerance)
        self._relative = Fraction(relative_tolerance)

    def check(self, row: Row) -> str:
        answer = find(row, self._answer)
        # Nearly every answer of a large file is plain, and is told to be a number without being computed.
        if type(answer) is int or (isinstance(answer, str) and len(answer) < 20 and answer.isdecimal()):
            return ""
        return (
            ""
            if last_number(str(answer)) is not None
            else f'no number in column "{self._answer}": {answer!r:.60}'
        )

    async def score(self, reply: str, row: Row) -> Score:
        said = last_number(reply)
        if said is None:
            return NO_ANSWER
        right = last_number(str(find(row, self._answer)))
        assert right is not None, "checked when the row was read"
        allowed = max(self._tolerance, self._relative * abs(right))
        return Score(float(abs(said - right) <= allowed))


def last_number(text: str) -> Fraction | None:
    """The last number that stands in a text, exactly; None where there is none."""
    found = _NUMBER.findall(text)
    return _number(found[-1]) if found else None


def _number(text: str) -> Fraction | None:
    plain = "".join(text.replace(",", "").replace("−", "-").split()).rstrip(".")
    exponent = re.search(r"[eE]([-+]?\d+)", plain)
    # An exact number of more digits than anybody means would take for ever to compute with.
    if len(plain) > _MOST_DIGITS or (exponent and abs(int(exponent[1])) > _MOST_DIGITS):
        return None
    top, _, bottom = plain.partition("/")
    try:
        return Fraction(top) / Fraction(bottom or "1")
    except (ValueError, ZeroDivisionError):
        return None
