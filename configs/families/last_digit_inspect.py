"""A task of Inspect: the last digit of a number."""

import random

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def last_digit(seed: int = 0) -> Task:
    numbers = random.Random(seed)
    asked = [str(numbers.randrange(1000, 10_000)) for _ in range(200)]
    samples = [Sample(input=f"Last digit of {number}", target=number[-1]) for number in asked]
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=exact())
