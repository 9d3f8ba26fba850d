"""docs/journal.md: every query in it gives an answer on a real journal, and every column is explained."""

import asyncio
import re
import sqlite3
from pathlib import Path

import pytest

from orchestrator.curriculum import TaskOutcome
from orchestrator.journal import JournalReader
from orchestrator.journal.schema import SCHEMA_VERSION
from orchestrator.sinks.eval_sink import summarise
from orchestrator.tasks.evaluations import EvalPlan, Evaluation
from tests.support.journal_groups import make_batch, make_group
from tests.support.journal_opening import open_journal

TEXT = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()
QUERIES = [line.partition("--")[0].strip() for line in re.findall(r"^sqlite> (.*)$", TEXT, re.MULTILINE)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with something of everything in its journal."""
    directory = tmp_path_factory.mktemp("run")

    async def record() -> None:
        async with open_journal(directory) as journal:
            for group in (*make_batch(1).groups, make_group(5)):
                journal.record_group(group, TaskOutcome(group.task.index, 0, 0.5, 4, equal=False))
            journal.record_batch(make_batch(1), lambda: None)
            journal.record_ack(1, 0, world_size=1)
            journal.record_task("math", 2, "filtered", TaskOutcome(7, 0, 1.0, 4, equal=True))
            journal.prune("math", 3)
            journal.record_states({"mix": {}})
            plan = EvalPlan("math", "test", num_examples=2, rollouts_per_example=4, interval=10)
            journal.record_eval(summarise(Evaluation(plan, 1, 0, 0.0, rewards=[[1.0, 0.0, 0.0, 1.0]]), 1.0))

    asyncio.run(record())
    return directory


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_of_the_docs_gives_an_answer(run_dir: Path, query: str) -> None:
    """At least one row, and no empty field in it."""
    with sqlite3.connect(f"file:{run_dir}/journal/journal.sqlite3?mode=ro", uri=True) as connection:
        rows = connection.execute(query).fetchall()
    connection.close()
    assert rows
    assert all(value is not None for row in rows for value in row), rows


def test_the_docs_have_queries_and_the_methods_for_people_exist() -> None:
    """What the text names can be called."""
    assert len(QUERIES) >= 6
    (named,) = re.findall(r"JournalReader\(run_dir\)` has ((?:[^.]|\n)*?),\nthe last", TEXT)
    methods = re.findall(r"`(\w+)\(\)`", named)
    assert len(methods) == 9
    assert all(callable(getattr(JournalReader, method)) for method in methods)


def test_every_table_and_column_is_explained(run_dir: Path) -> None:
    """Under the heading that names the schema that is written today."""
    assert f"## Tables (schema {SCHEMA_VERSION}," in TEXT
    tables = TEXT.partition("## Tables")[2]
    with sqlite3.connect(run_dir / "journal" / "journal.sqlite3") as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in names:
            if table.startswith("sqlite_"):
                continue
            assert f"**{table}**" in tables
            for column in connection.execute("SELECT name FROM pragma_table_info(?)", (table,)):
                assert f"`{column[0]}`" in tables, f"{table}.{column[0]}"
    connection.close()
