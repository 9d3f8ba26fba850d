"""A classic verifiers environment of one turn, for measuring what hosting it costs."""

# Its library is only in a virtualenv of its own.
# mypy: ignore-errors

from typing import Any

import verifiers as vf
from datasets import Dataset


def correct(completion: Any, answer: str) -> float:
    return float((completion[-1].content or "") == answer)


def load_environment() -> vf.Environment:
    words = [f"word{number}" for number in range(512)]
    dataset = Dataset.from_dict(
        {"question": [f"Reverse {word}" for word in words], "answer": [w[::-1] for w in words]}
    )
    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[correct]))
