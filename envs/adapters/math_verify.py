"""Whether two texts are the same mathematics, by math-verify. Imported in helper processes alone, see `envs.dataset.aside`."""

import logging
from typing import Any

import math_verify  # type: ignore[import-not-found]  # an extra

# It warns at every call that its own limit of time is off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def are_equal(answer: str, reply: str) -> bool | None:
    """Whether a reply says the same as the answer; None where it says nothing mathematical."""
    right = _right(answer)
    if not right:
        raise ValueError(f"the answer is not mathematics: {answer!r:.100}")
    said = _parse(reply)
    if not said:
        return None
    return bool(math_verify.verify(right, said, timeout_seconds=None))


def _right(answer: str) -> Any:
    """The answer as the library reads it: with the marks that it looks for, unless it has them."""
    marked = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
    return _parse(answer if marked else f"${answer}$") or _parse(answer)


def _parse(text: str) -> Any:
    # The library's own limits are alarms; ours is the end of the process.
    return math_verify.parse(text, parsing_timeout=None)
