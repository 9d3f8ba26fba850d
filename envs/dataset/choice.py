"""Multiple choice: which of the offered choices the reply picks. Pure.

The answer of a row is a letter, the number of a choice counted from 0 (a number, not text), or a choice's own text.
A reply picks by a letter, alone or in its last line or after "answer is", or by a choice's own text.
"""

import re
from typing import Any

from envs.dataset.rows import Row
from envs.dataset.scoring import NO_ANSWER, Score, Scorer
from envs.dataset.template import LETTERS, find

_ALONE = re.compile(r"\W*([A-Za-z])\W*")
_BEGINS = re.compile(r"\W*([A-Za-z])\s*[).:](?:\s|$)")
_ANNOUNCED = re.compile(
    # What stands between is taken once and for all (`*+`): thousands of spaces would be shared out in every way otherwise.
    r"(?i:\b(?:answer|choice|option)\b\W*+(?:is|would be)?)[\s:*(\[{\"'`$\\]*+(?:boxed\{|text\{)*([A-Za-z])\b"
)


class Choice(Scorer):
    """`choices` is the column with the list of choices, which "{choices}" in the prompt writes as lettered lines."""

    def __init__(self, answer: str = "answer", choices: str = "choices") -> None:
        self.columns = [answer, choices]
        self._answer = answer
        self._choices = choices

    def check(self, row: Row) -> str:
        choices = find(row, self._choices)
        if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
            return f'column "{self._choices}" is not a list of 2 to {len(LETTERS)} choices'
        answer = find(row, self._answer)
        if _place_of(answer, choices) is None:
            return f'column "{self._answer}" names none of the {len(choices)} choices: {answer!r:.60}'
        return ""

    async def score(self, reply: str, row: Row) -> Score:
        choices = [str(choice) for choice in find(row, self._choices)]
        picked = pick(reply, choices)
        if picked is None:
            return NO_ANSWER
        return Score(float(picked == _place_of(find(row, self._answer), choices)))


def pick(reply: str, choices: list[str]) -> int | None:
    """The place of the choice that a reply picks; None where it picks none."""
    texts = [" ".join(choice.split()).casefold() for choice in choices]
    lines = [line.strip() for line in reply.strip().splitlines() if line.strip()]
    if not lines:
        return None
    for said in (reply.strip(), lines[-1]):
        alone = _ALONE.fullmatch(said)
        if alone and (place := _letter(alone[1], choices)) is not None:
            return place
        plain = " ".join(said.split()).casefold().rstrip(".")
        if plain in texts:
            return texts.index(plain)
    announced = _ANNOUNCED.findall(reply)
    if announced and (place := _letter(announced[-1], choices)) is not None:
        return place
    begins = _BEGINS.match(lines[-1])
    return _letter(begins[1], choices) if begins else None


def _letter(letter: str, choices: list[Any]) -> int | None:
    place = LETTERS.index(letter.upper())
    return place if place < len(choices) else None


def _place_of(answer: Any, choices: list[Any]) -> int | None:
    if isinstance(answer, bool):
        return None
    if isinstance(answer, int):
        return answer if 0 <= answer < len(choices) else None
    texts = [str(choice) for choice in choices]
    if str(answer) in texts:
        return texts.index(str(answer))
    plain = str(answer).strip().strip("().")
    return _letter(plain, choices) if len(plain) == 1 and plain.upper() in LETTERS else None
