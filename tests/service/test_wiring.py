"""How the shells are joined to a run: offers to the trainer, the file of evaluations, what wakes the driver."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.groups.group import Batch
from orchestrator.inference import InferencePool
from orchestrator.journal import Journal, Recovered
from orchestrator.run.run import Run
from orchestrator.service.driver import Driver
from orchestrator.service.weights import WeightLoader
from orchestrator.service.wiring import EvaluationFile, Offers, drop_old_removals, join_shells
from orchestrator.trainer_link.server import BatchServer
from tests.support.journal_groups import make_batch


class FakeServer:
    """Writes down what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def offer(self, batch: Batch) -> None:
        self.calls.append(("offer", batch.step))

    def keep(self, batch: Batch) -> None:
        self.calls.append(("keep", batch.step))

    def restore(self, batch: Batch, ranks: Any) -> None:
        self.calls.append(("restore", batch.step, list(ranks)))

    def finish(self, why: str) -> None:
        self.calls.append(("finish", why))


def offers_of(max_steps: int | None) -> tuple[Offers, FakeServer]:
    offers, server = Offers(max_steps), FakeServer()
    offers.server = cast("BatchServer", server)
    return offers, server


def recovered_of(**fields: Any) -> Recovered:
    known = {"batches": [], "acknowledged": set(), "acks": {}, "last_step": 0}
    return cast("Recovered", SimpleNamespace(**(known | fields)))


def test_behind_the_last_batch_iteration_ends() -> None:
    """The last batch is offered before that is said."""
    offers, server = offers_of(2)
    offers(make_batch(1))
    offers(make_batch(2))
    assert server.calls == [("offer", 1), ("offer", 2), ("finish", "max_steps reached")]


def test_a_run_without_an_end_only_offers() -> None:
    """Without max_steps the trainer decides."""
    offers, server = offers_of(None)
    offers(make_batch(1))
    assert server.calls == [("offer", 1)]


def test_batches_of_an_earlier_process_are_leased_again_with_who_has_acknowledged_them() -> None:
    """Those that every rank is done with are only kept, for ranks that ask again."""
    offers, server = offers_of(3)
    batches = [make_batch(1), make_batch(2), make_batch(3)]
    offers.recovered(recovered_of(batches=batches, acknowledged={1}, acks={2: [1]}, last_step=3))
    assert server.calls == [
        ("keep", 1),
        ("restore", 2, [1]),
        ("restore", 3, []),
        ("finish", "max_steps reached"),
    ]


def test_a_run_that_was_not_at_its_end_is_not_ended_by_its_recovery() -> None:
    """There are more batches to come."""
    offers, server = offers_of(3)
    offers.recovered(recovered_of(batches=[make_batch(2)], last_step=2))
    assert server.calls == [("restore", 2, [])]


def test_the_file_of_evaluations_says_what_the_journal_says(tmp_path: Path) -> None:
    """What an earlier process wrote and did not bring to the journal goes; new results are appended."""
    path = tmp_path / "evals.jsonl"
    path.write_text('{"step": 9}\n{"ste')
    results = EvaluationFile(tmp_path)
    results.rewrite([{"step": 0}])
    results.append({"step": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 0}, {"step": 2}]
    results.rewrite([])
    assert path.read_text() == ""


def test_a_result_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    """It is in the journal; a full disk or a file of another user costs a line of this file alone."""
    results = EvaluationFile(tmp_path)
    (tmp_path / "evals.jsonl").mkdir()
    results.rewrite([{"step": 0}])
    results.append({"step": 1})
    (tmp_path / "evals.jsonl").rmdir()
    results.append({"step": 2})
    assert json.loads((tmp_path / "evals.jsonl").read_text()) == {"step": 2}


def test_a_run_without_evaluations_has_no_file_of_them(tmp_path: Path) -> None:
    """Nothing is written where nothing was evaluated."""
    EvaluationFile(tmp_path).rewrite([])
    assert not (tmp_path / "evals.jsonl").exists()


def test_whatever_changes_what_a_run_looks_at_wakes_its_driver() -> None:
    """The inference servers, the room in the journal; and a lost inference server is told."""
    said: list[Any] = []
    run = SimpleNamespace(
        on_endpoint_lost="on_endpoint_lost", on_endpoint_found="found", on_endpoint_gone="gone"
    )
    driver = SimpleNamespace(
        run=run,
        wake=lambda: said.append("wake"),
        tell=lambda event, *arguments: said.append((event, *arguments)),
    )
    loader = SimpleNamespace(look=lambda driver: said.append("look"))
    pool, journal = SimpleNamespace(), SimpleNamespace()
    join_shells(
        cast("Driver[Run]", driver),
        pool=cast("InferencePool", pool),
        loader=cast("WeightLoader", loader),
        journal=cast("Journal", journal),
    )
    pool.on_change()
    journal.on_room()
    pool.on_lost("engine")
    pool.on_found("http://a/v1", "file:engines.txt")
    pool.on_gone("http://a/v1")
    assert said == [
        "look",
        "wake",
        ("on_endpoint_lost", "engine"),
        ("found", "http://a/v1", "file:engines.txt"),
        ("gone", "http://a/v1"),
    ]


@pytest.mark.parametrize(
    ("named", "complete", "ended"),
    [(["http://b/v1"], True, ["http://a/v1"]), (["http://a/v1"], True, []), ([], False, [])],
    ids=["dropped", "named", "not answered yet"],
)
def test_a_removal_ends_when_its_source_dropped_the_server_while_no_process_looked(
    named: list[str], complete: bool, ended: list[str]
) -> None:
    """Whoever has its address by now is another server; a source that has not answered has dropped nobody."""
    gone: list[str] = []
    changes = SimpleNamespace(removed={"http://a/v1": None})
    run = SimpleNamespace(control=SimpleNamespace(changes=changes, gone=gone.append))
    membership = SimpleNamespace(complete=complete, named_by=lambda url: "file:x" if url in named else "")
    drop_old_removals(cast("Run", run), cast("InferencePool", SimpleNamespace(membership=membership)))
    assert gone == ended
