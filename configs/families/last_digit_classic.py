"""A classic environment of verifiers: the last digit of a number."""

import random

import verifiers as vf
from datasets import Dataset


def correct(completion, answer: str) -> float:
    return float((completion[-1].content or "").strip() == answer)


def load_environment(size: int = 200) -> vf.Environment:
    numbers = random.Random(0)
    asked = [str(numbers.randrange(1000, 10_000)) for _ in range(size)]
    rows = {"question": [f"Last digit of {number}" for number in asked], "answer": [n[-1] for n in asked]}
    return vf.SingleTurnEnv(dataset=Dataset.from_dict(rows), rubric=vf.Rubric(funcs=[correct]))
