"""Files and scorers of `dataset::` that need a library: Parquet, folders of Hugging Face, mathematics, schemas."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.conftest import Driver
from tests.adapters.venvs import CHECKOUT, DATASET
from tests.support.archived import batch_of, opened, pending

ROWS = [
    {"question": f"{number} + 1?", "answer": number + 1, "meta": {"deep": [number]}} for number in range(300)
]

SAVE = """
import json, sys
import datasets, pyarrow, pyarrow.parquet
folder, rows = sys.argv[1], json.loads(sys.stdin.read())
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), f"{folder}/rows.parquet", row_group_size=64)
one = datasets.Dataset.from_list(rows)
one.save_to_disk(f"{folder}/one", num_shards=3)
shuffled = one.shuffle(seed=0).select(range(50))
datasets.DatasetDict({"train": one.select(range(200)), "test": shuffled}).save_to_disk(f"{folder}/several")
print(json.dumps([row["question"] for row in shuffled]))
"""


@pytest.fixture(scope="module")
def saved(dataset: Driver, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Files as the libraries themselves write them, and the questions of the split that was shuffled."""
    folder = tmp_path_factory.mktemp("saved")
    done = subprocess.run(
        [DATASET.python, "-c", SAVE, str(folder)],
        input=json.dumps(ROWS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def play(dataset: Driver, path: Path, runs: list[dict[str, Any]], **scenario: Any) -> dict[str, Any]:
    args = {"prompt": "{question} {meta.deep}", "scorer": "numeric"}
    return dataset.play(f"dataset::{path}", runs, args=args, **scenario)


def asked(played: dict[str, Any]) -> list[str]:
    return [answer["transcripts"][0]["messages"][-2]["content"] for answer in played["answers"]]


@pytest.mark.parametrize("name", ["rows.parquet", "one"])
def test_a_file_of_the_library_has_its_rows(
    dataset: Driver, saved: tuple[Path, list[str]], name: str
) -> None:
    """Over row groups and shards, in the order of the file."""
    indices = [0, 1, 63, 64, 128, 199, 299]
    played = play(
        dataset, saved[0] / name, [{"index": index} for index in indices], turns=[[{"content": "65"}]]
    )
    assert played["tasks"] == {"train": 300}
    assert asked(played) == [f"{index} + 1? A. {index}" for index in indices]
    rewards = [answer["rollouts"][0]["reward"] for answer in played["answers"]]
    assert rewards == [float(index == 64) for index in indices]


def test_a_folder_of_several_splits_has_those(dataset: Driver, saved: tuple[Path, list[str]]) -> None:
    """Each under its own name; one that was shuffled is in its new order."""
    folder, questions = saved
    runs = [{"index": index, "split": "test"} for index in range(50)]
    played = play(dataset, folder / "several", runs, splits=["train", "test"])
    assert played["tasks"] == {"train": 200, "test": 50}
    assert [text.split(" A.")[0] for text in asked(played)] == questions


@pytest.mark.parametrize(
    ("name", "prompt", "says"),
    [
        ("rows.parquet", "{question} {missing}", 'row 0: no column "missing"'),
        ("several", "{question} {missing}", 'row 0: no column "missing"'),
        ("broken.parquet", "{question}", "cannot be read as Parquet"),
        ("broken", "{question}", "cannot be read as a folder of `save_to_disk`"),
    ],
)
def test_bad_files_and_rows_are_one_line(
    dataset: Driver, saved: tuple[Path, list[str]], name: str, prompt: str, says: str
) -> None:
    """Before anything runs."""
    folder = saved[0]
    (folder / "broken.parquet").write_text("no parquet")
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken" / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    played = dataset.play(f"dataset::{folder / name}", args={"prompt": prompt, "scorer": "numeric"})
    assert says in played["load_error"]
    assert "\n" not in played["load_error"]


def scored(
    dataset: Driver, tmp_path: Path, row: dict[str, Any], scorer: Any, replies: list[str]
) -> list[dict[str, Any]]:
    """The rollouts of several replies to one row."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "?", **row}) + "\n")
    found = []
    for reply in replies:
        answer = dataset.rollout(
            f"dataset::{path}", args={"prompt": "{question}", "scorer": scorer}, turns=[[{"content": reply}]]
        )
        found.append(answer["rollouts"][0] if "rollouts" in answer else answer)
    return found


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("1/2", ["\\boxed{0.5}", "So the answer is $\\frac{1}{2}$.", "1/2"], ["\\boxed{\\frac{1}{3}}"]),
        ("$\\frac{\\sqrt{2}}{2}$", ["$\\frac{1}{\\sqrt{2}}$"], ["$\\sqrt{2}$"]),
        ("(x+1)^2", ["$x^2 + 2x + 1$"], ["$x^2 + 1$"]),
        (42, ["First 41, then \\boxed{42}"], ["\\boxed{41}"]),
    ],
)
def test_mathematics_is_compared_by_meaning(
    dataset: Driver, tmp_path: Path, answer: Any, right: list[str], wrong: list[str]
) -> None:
    """However the reply writes it."""
    rollouts = scored(dataset, tmp_path, {"answer": answer}, "math", [*right, *wrong])
    assert [rollout["reward"] for rollout in rollouts] == [1.0] * len(right) + [0.0] * len(wrong)


def test_mathematics_that_takes_for_ever_is_stopped(dataset: Driver, tmp_path: Path) -> None:
    """A tower of powers is worth nothing, and the next reply is scored again; a reply without mathematics is not answered."""
    scorer = {"name": "math", "timeout_s": 5.0}
    late, right, none = scored(
        dataset,
        tmp_path,
        {"answer": "7"},
        scorer,
        ["\\boxed{9^{9^{9^9}} \\bmod 10}", "\\boxed{7}", "no idea"],
    )
    assert (late["reward"], right["reward"]) == (0.0, 1.0)
    assert (none["reward"], none["metrics"]["answered"]) == (0.0, 0.0)


def test_an_answer_that_is_no_mathematics_fails_the_rollout(dataset: Driver, tmp_path: Path) -> None:
    """Never a zero for a right reply."""
    (failed,) = scored(dataset, tmp_path, {"answer": "\\boxed{}"}, "math", ["\\boxed{7}"])
    assert "the answer is not mathematics" in failed["message"]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize(
    ("row", "scorer"),
    [
        ({}, {"name": "json_schema", "schema": SCHEMA}),
        ({"wanted": SCHEMA}, {"name": "json_schema", "column": "wanted"}),
        ({"wanted": json.dumps(SCHEMA)}, {"name": "json_schema", "column": "wanted"}),
    ],
)
def test_a_reply_must_be_json_of_the_schema(
    dataset: Driver, tmp_path: Path, row: dict[str, Any], scorer: Any
) -> None:
    """Alone or in a block; one schema for all or one per row."""
    replies = [
        '{"name": "Ann", "age": 3}',
        'Sure:\n```json\n{"name": "Ann", "age": 3}\n```',
        '{"name": "Ann"}',
        "Ann",
    ]
    rollouts = scored(dataset, tmp_path, row, scorer, replies)
    assert [rollout["reward"] for rollout in rollouts] == [1.0, 1.0, 0.0, 0.0]
    assert [rollout["metrics"]["parsed"] for rollout in rollouts] == [1.0, 1.0, 1.0, 0.0]


def test_a_schema_whose_pattern_takes_for_ever_is_stopped(dataset: Driver, tmp_path: Path) -> None:
    """A reply that is not validated in time is worth nothing, and the next is validated again."""
    scorer = {
        "name": "json_schema",
        "schema": {"type": "string", "pattern": "^(a|a)*$"},
        "timeout_s": 2.0,
    }
    late, right = scored(dataset, tmp_path, {}, scorer, [json.dumps("a" * 60 + "b"), '"aaa"'])
    assert (late["reward"], late["metrics"]["timed_out"]) == (0.0, 1.0)
    assert (right["reward"], right["metrics"]["timed_out"]) == (1.0, 0.0)


def test_a_schema_that_is_none_is_a_mistake(dataset: Driver, tmp_path: Path) -> None:
    """Of the configuration, or of a line."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "?", "wanted": {"type": "nothing"}}\n')
    for scorer, says in (
        ({"name": "json_schema", "schema": {"type": "nothing"}}, "not a JSON schema"),
        ({"name": "json_schema", "column": "wanted"}, 'line 1: column "wanted": not a JSON schema'),
        ({"name": "json_schema"}, "give either schema or column"),
    ):
        played = dataset.play(f"dataset::{path}", args={"prompt": "{q}", "scorer": scorer})
        assert says in played["load_error"]


EXPORT = """
import json, sys
from pathlib import Path
import pyarrow.parquet
from orchestrator.archive import RolloutReader
from orchestrator.archive.export import export
run_dir, file = map(Path, sys.argv[1:])
with RolloutReader(run_dir) as reader:
    written = export(reader.groups(readable=True), file)
print(json.dumps({"written": written, "rows": pyarrow.parquet.read_table(file).to_pylist()}))
"""


def test_rollouts_of_a_run_are_exported_as_parquet(dataset: Driver, tmp_path: Path) -> None:
    """A row for each rollout, as pyarrow itself reads it; nested values are JSON."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    first = pending(0, (0.0, 1.0))
    with opened(run_dir) as archive:
        archive.scored(first, "queued", 12.0)
        archive.batch_formed(batch_of(1, first))
    done = subprocess.run(
        [DATASET.python, "-c", EXPORT, str(run_dir), str(tmp_path / "rollouts.parquet")],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["written"] == len(told["rows"]) == 2
    assert [row["reward"] for row in told["rows"]] == [0.0, 1.0]
    assert {(row["env"], row["step"], row["outcome"]) for row in told["rows"]} == {("math", 1, "trained")}
    assert all(json.loads(row["messages"])[0]["role"] == "user" for row in told["rows"])
