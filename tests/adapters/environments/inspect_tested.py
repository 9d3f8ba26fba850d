"""Tasks of Inspect for the adapter's tests, and the library's own run of them."""

# Its library is only in a virtualenv of its own.
# mypy: ignore-errors

import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

os.environ.setdefault("INSPECT_DISPLAY", "none")

from inspect_ai import Task, task
from inspect_ai import eval as run_eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import list_eval_logs, read_eval_log
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, accuracy, includes, match, model_graded_qa, scorer
from inspect_ai.solver import generate, solver, use_tools
from inspect_ai.tool import tool


def questions() -> MemoryDataset:
    return MemoryDataset(
        [Sample(input=f"What is {number} + 1?", target=str(number + 1), id=number) for number in range(20)]
    )


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    return execute


@solver
def raising():
    async def solve(state, generate):
        raise ValueError("nothing works")

    return solve


@scorer(metrics=[accuracy()])
def parts():
    async def score(state, target):
        return Score(value={"right": float(target.text in state.output.completion), "length": 7.0})

    return score


@scorer(metrics=[accuracy()])
def verdict():
    async def score(state, target):
        return Score(value=state.output.completion)

    return score


@task
def judged(with_parts: bool = False) -> Task:
    scorers = [verdict(), parts()] if with_parts else [verdict()]
    return Task(dataset=questions(), solver=generate(), scorer=scorers)


@task
def sums(prefix: str = "") -> Task:
    dataset = questions()
    for sample in dataset:
        sample.input = prefix + sample.input
    return Task(dataset=dataset, solver=generate(), scorer=includes())


@task
def with_tools() -> Task:
    return Task(dataset=questions(), solver=[use_tools(add()), generate()], scorer=match())


@task
def conversations() -> Task:
    dataset = [
        Sample(input=[ChatMessageUser(content=f"What is {number} + 1?")], target=str(number + 1))
        for number in range(2)
    ]
    return Task(dataset=dataset, solver=generate(), scorer=includes())


@task
def graded() -> Task:
    return Task(dataset=questions(), solver=generate(), scorer=model_graded_qa())


@task
def several() -> Task:
    return Task(dataset=questions(), solver=generate(), scorer=[includes(), parts()])


@task
def broken() -> Task:
    return Task(dataset=questions(), solver=raising(), scorer=includes())


@task
def limited() -> Task:
    return Task(dataset=questions(), solver=[use_tools(add()), generate()], scorer=match(), message_limit=4)


@task
def unscored() -> Task:
    return Task(dataset=questions(), solver=generate())


@task
def picture() -> Task:
    content = [ContentText(text="What is this?"), ContentImage(image="data:image/png;base64,iVBORw0KGgo=")]
    return Task(
        dataset=[Sample(input=[ChatMessageUser(content=content)], target="x")],
        solver=generate(),
        scorer=includes(),
    )


def library_run(name: str, replies: list[str]) -> dict[str, Any]:
    """Score and messages of a task's first sample by the library's own mock model."""
    outputs = [ModelOutput.from_content("mockllm/model", reply) for reply in replies]
    for output in outputs:
        output.usage = ModelUsage()  # it would download a tokenizer to count
    with tempfile.TemporaryDirectory() as directory:
        model = get_model("mockllm/model", custom_outputs=outputs, memoize=False)
        sample = run_eval(globals()[name](), model=model, limit=1, log_dir=directory, display="none")[
            0
        ].samples[0]
    return {
        "value": next(iter(sample.scores.values())).value,
        "messages": [[message.role, message.text] for message in sample.messages],
    }


def count_writes(directory: str) -> list[int]:
    """How often samples were written to each log."""
    return [
        sum(name.startswith("_journal/summaries/") for name in zipfile.ZipFile(path).namelist())
        for path in Path(directory).glob("*.eval")
    ]


def read_logs(directory: str) -> list[dict[str, Any]]:
    """What `inspect view` would open."""
    logs = [read_eval_log(info) for info in list_eval_logs(directory)]
    return [
        {
            "status": log.status,
            "samples": len(log.samples or []),
            "scores": sorted(
                str(score.value) for sample in log.samples or [] for score in (sample.scores or {}).values()
            ),
        }
        for log in logs
    ]
