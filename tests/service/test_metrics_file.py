"""`metrics.jsonl` says what the journal says."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.dispatch.ledger import Ledger
from orchestrator.dispatch.versions import Versions
from orchestrator.facts import Facts
from orchestrator.journal import Journal, JournalReader
from orchestrator.service.metrics_file import Follower, MetricsFile
from tests.support.journal_groups import make_batch
from tests.support.journal_opening import open_journal
from tests.support.waiting import until


async def form(journal: Journal, step: int, states: dict[str, Any] | None = None) -> None:
    """A step's batch, formed and durable."""
    batch, durable = make_batch(step), asyncio.Event()
    facts = Facts({"math": 1.0}, ledger=Ledger(), versions=Versions(max_versions=2), now=0.0)
    for group in batch.groups:
        journal.record_group(group)
    record = facts.batch_formed(batch, quarantined=frozenset(), now=1.0)
    journal.record_batch(batch, durable.set, record=record, states=states or {})
    await durable.wait()


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_a_step_gets_its_line_when_it_is_acknowledged_with_what_the_trainer_reported(
    tmp_path: Path,
) -> None:
    """Not before; evaluations stand between the steps in the order of their ends."""
    async with open_journal(tmp_path) as journal, MetricsFile(tmp_path, poll_s=0.01):
        await form(journal, 1)
        await form(journal, 2)
        journal.record_report(1, {"loss": 0.5, "kl": 0.25})
        journal.record_report(1, {"loss": 0.75})
        journal.record_acknowledged(1)
        await until(lambda: len(lines(tmp_path)) == 1)
        journal.record_eval({"env": "math", "step": 1, "version": 1, "avg@1": 0.5})
        await until(lambda: len(lines(tmp_path)) == 2)
        journal.record_acknowledged(2)
        await until(lambda: len(lines(tmp_path)) == 3)
    first, evaluation, second = lines(tmp_path)
    assert (first["kind"], first["step"], first["trainer"]) == ("step", 1, {"loss": 0.75, "kl": 0.25})
    assert first["at"] <= first["acknowledged_at"]
    assert (evaluation["kind"], evaluation["avg@1"]) == ("eval", 0.5)
    assert (second["step"], second["trainer"]) == (2, {})
    assert second["sequences"] == sum(second["lengths"])


async def test_what_came_last_before_the_end_is_in_the_file(tmp_path: Path) -> None:
    """Leaving reads once more, however long the pause between two looks is."""
    async with open_journal(tmp_path) as journal, MetricsFile(tmp_path, poll_s=600):
        await form(journal, 1)
        journal.record_acknowledged(1)
        await journal.flush()
    assert [line["step"] for line in lines(tmp_path)] == [1]


async def test_a_later_process_mends_the_file_and_tells_only_what_is_new(tmp_path: Path) -> None:
    """A torn line, a missing one and foreign text are written over; listeners hear of a line once."""
    told: list[int] = []

    def listen(line: dict[str, Any]) -> None:
        told.append(line["step"])

    async with open_journal(tmp_path) as journal:
        async with MetricsFile(tmp_path, [listen], poll_s=0.01):
            for step in (1, 2):
                await form(journal, step)
                journal.record_acknowledged(step)
            await until(lambda: told == [1, 2])
        await form(journal, 3)
        journal.record_acknowledged(3)
        await journal.flush()
        path = tmp_path / "metrics.jsonl"
        path.write_text(path.read_text() + '{"kind": "ste')
        async with MetricsFile(tmp_path, [listen], poll_s=0.01):
            await until(lambda: told == [1, 2, 3])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


async def test_after_a_run_was_set_back_every_line_comes_once(tmp_path: Path) -> None:
    """Evaluations that were given up leave gaps in their numbers, over which nothing is told twice."""
    states = {"version": {"published": [0], "path": None, "trained": 0}}
    async with open_journal(tmp_path) as journal:
        for step in (1, 2, 3):
            await form(journal, step, states)
            journal.record_acknowledged(step)
            journal.record_eval({"env": "math", "step": step, "version": step})
    told: list[tuple[str, int]] = []

    def listen(line: dict[str, Any]) -> None:
        told.append((line["kind"], line["step"]))

    async with (
        open_journal(tmp_path, rewind_to=1) as journal,
        MetricsFile(tmp_path, [listen], poll_s=0.01),
    ):
        for step in (2, 3):
            journal.record_eval({"env": "math", "step": step - 1, "version": step - 1})
            await journal.flush()
            await until(lambda step=step: ("eval", step - 1) in told)  # type: ignore[misc]  # binds the loop's value
            await form(journal, step, states)
            journal.record_acknowledged(step)
            await journal.flush()
            await until(lambda step=step: ("step", step) in told)  # type: ignore[misc]  # same
    assert told == [("step", 1), ("eval", 1), ("step", 2), ("eval", 2), ("step", 3)]
    assert [(line["kind"], line["step"]) for line in lines(tmp_path)] == told


async def test_a_file_that_cannot_be_written_costs_lines_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal goes on."""
    (tmp_path / "metrics.jsonl").mkdir(parents=True)
    async with open_journal(tmp_path) as journal, MetricsFile(tmp_path, poll_s=0.01):
        await form(journal, 1)
        journal.record_acknowledged(1)
        await journal.flush()
    assert "metrics_file.failed" in capsys.readouterr().out


async def test_a_file_that_can_be_written_again_has_every_line_and_so_have_the_trackers(
    tmp_path: Path,
) -> None:
    """A disk that is full for a while costs nothing but that while, however long the run goes on."""
    told: list[int] = []
    path = tmp_path / "metrics.jsonl"
    following = MetricsFile(tmp_path, [lambda line: told.append(line["step"])], poll_s=0.01, retry_s=0.02)
    async with open_journal(tmp_path) as journal, following:
        await form(journal, 1)
        journal.record_acknowledged(1)
        await until(lambda: told == [1])
        path.unlink()
        path.mkdir()
        await form(journal, 2)
        journal.record_acknowledged(2)
        await journal.flush()
        await until(lambda: following._failing)
        path.rmdir()
        await until(lambda: told == [1, 2])
        await form(journal, 3)
        journal.record_acknowledged(3)
        await until(lambda: told == [1, 2, 3])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


async def test_steps_stay_in_their_order_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later process reads all of them at once, and tells trackers those that it thinks are new."""
    now = [1000.0]
    monkeypatch.setattr("orchestrator.journal.store.time.time", lambda: now[0])
    async with open_journal(tmp_path) as journal:
        for step, at in ((1, 1000.0), (2, 400.0), (3, 401.0)):
            now[0] = at
            await form(journal, step)
            journal.record_acknowledged(step)
            await journal.flush()
        async with MetricsFile(tmp_path, poll_s=0.01):
            pass
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


async def test_a_later_process_tells_what_is_new_also_when_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation then stands before a step that was told already; each of them is told once."""
    now = [1000.0]
    monkeypatch.setattr("orchestrator.journal.store.time.time", lambda: now[0])
    told: list[tuple[str, int]] = []
    following = [
        MetricsFile(tmp_path, [lambda line: told.append((line["kind"], line["step"]))]) for _ in "12"
    ]
    async with open_journal(tmp_path) as journal:
        await form(journal, 1)
        journal.record_acknowledged(1)
        await journal.flush()
        async with following[0]:
            pass
        now[0] = 400.0
        journal.record_eval({"env": "math", "step": 1, "version": 1})
        await journal.flush()
        async with following[1]:
            pass
    assert told == [("step", 1), ("eval", 1)]


async def test_a_later_process_tells_a_step_that_an_earlier_one_saw_too_late(tmp_path: Path) -> None:
    """A step and an evaluation ended between two reads: a process that died then had told the later of them alone."""
    async with open_journal(tmp_path) as journal:
        await form(journal, 1)
        await journal.flush()
        loop = asyncio.get_running_loop()

        async def end() -> None:
            journal.record_acknowledged(1)
            await journal.flush()
            journal.record_eval({"env": "math", "step": 1, "version": 1})
            await journal.flush()

        class Slow(JournalReader):
            """Both end when it has looked for steps, and not yet for evaluations."""

            def evals(self, *, since: int = 0, last: int | None = None) -> list[dict[str, Any]]:
                asyncio.run_coroutine_threadsafe(end(), loop).result(30.0)
                return super().evals(since=since, last=last)

        def read() -> list[dict[str, Any]]:
            with Slow(tmp_path) as reader:
                return Follower(reader).read()

        [line] = await asyncio.to_thread(read)
        assert line["kind"] == "eval"
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        told: list[str] = []
        async with MetricsFile(tmp_path, [lambda line: told.append(line["kind"])]):
            pass
    assert told == ["step"]
    assert [line["kind"] for line in lines(tmp_path)] == ["step", "eval"]
