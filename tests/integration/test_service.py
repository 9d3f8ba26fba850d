"""The whole service in this process, with real env servers, a real policy server and trainers: how a run goes."""

import asyncio
import json
import re
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from structlog.testing import capture_logs

from orchestrator.errors import StalledError
from orchestrator.journal import JournalReader
from orchestrator.local.server import run_policy_server
from orchestrator.service import start_service
from orchestrator.trainer import AsyncTrainerClient
from tests.integration.env_servers import until
from tests.integration.recording_trainer import TrainerRecord, train_here
from tests.integration.service_fixture import env, make_config, run_command, running_service


@pytest.fixture
async def policy() -> AsyncIterator[str]:
    """The address of an inference server."""
    async with run_policy_server() as base_url:
        yield base_url


@pytest.fixture
def record() -> TrainerRecord:
    """What the trainer of a test writes down."""
    return TrainerRecord()


# --- a whole run ------------------------------------------------------------------------------------------------


async def test_a_run_ends_by_itself_after_its_steps(
    tmp_path: Path, policy: str, record: TrainerRecord
) -> None:
    """Two ranks get every step once, in exact halves; the summary is written and nothing is left behind."""
    envs = [env("Chat"), env("Ranked")]
    config = make_config(tmp_path / "run", policy, envs, max_steps=6, trainer={"world_size": 2})
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        for rank in range(2):
            group.create_task(train_here(running.address, record, rank=rank, world_size=2))
        assert await running.wait_end() == "max_steps reached"
    record.check(world_size=2, batch_size=8)
    assert record.last_step == 6
    assert {group.split("/")[0] for group in record.groups()} == {"chat", "ranked"}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["sequences"]) == (6, 48)


async def test_the_trainer_ends_the_run(tmp_path: Path, policy: str) -> None:
    """Without max_steps a run goes on until the trainer says that it is done."""
    config = make_config(tmp_path / "run", policy, [env("Dice")])
    async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
        batch = await trainer.next_batch()
        assert batch is not None
        await trainer.done()
        assert await running.wait_end() == "the trainer said it is done"


async def test_a_run_ends_only_when_its_last_step_is_acknowledged(tmp_path: Path, policy: str) -> None:
    """A trainer that has published its last version may take its time before it is done with the batch."""
    config = make_config(tmp_path / "run", policy, [env("Dice")], max_steps=1)
    async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
        assert await trainer.next_batch() is not None
        await trainer.publish(1)
        await until(lambda: running.service.run.parts.versions.serving == 1)
        # Nothing tells that a run goes on, so it is given the time to end wrongly.
        ended, _ = await asyncio.wait([running.serving], timeout=0.5)
        assert not ended
        await trainer.ack(1)
        assert await running.wait_end() == "max_steps reached"


async def asked_order(tmp_path: Path, policy: str, name: str, seed: int) -> dict[str, list[int]]:
    """The tasks that each env was asked for, in order, during a short run."""
    files = {kind: tmp_path / f"{name}-{kind}" for kind in ("Dice", "Ranked")}
    envs = [env(kind, args={"asked": str(file), "tasks": 500}) for kind, file in files.items()]
    config = make_config(tmp_path / name, policy, envs, seed=seed, max_steps=20)
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        group.create_task(train_here(running.address, TrainerRecord()))
        await running.wait_end()
    return {kind: list(dict.fromkeys(map(int, file.read_text().split()))) for kind, file in files.items()}


async def test_the_seed_decides_which_tasks_are_asked_in_which_order(tmp_path: Path, policy: str) -> None:
    """Two runs with the same seed ask each env for the same tasks in the same order; another seed, another order."""
    first = await asked_order(tmp_path, policy, "first", seed=1)
    again = await asked_order(tmp_path, policy, "again", seed=1)
    other = await asked_order(tmp_path, policy, "other", seed=2)
    for kind in first:
        common = min(len(orders[kind]) for orders in (first, again, other))
        assert common >= 10
        assert first[kind][:common] == again[kind][:common]
        assert first[kind][:common] != other[kind][:common]


async def test_a_run_continues_where_it_was_stopped(
    tmp_path: Path, policy: str, record: TrainerRecord
) -> None:
    """Stopped by a signal and started again, steps go on without a gap and no task is trained on twice."""
    config = make_config(tmp_path / "run", policy, [env("Dice", args={"tasks": 50})])
    for life in range(3):
        async with running_service(config) as running, asyncio.TaskGroup() as group:
            training = group.create_task(train_here(running.address, record))
            await until(lambda: record.last_step >= 6 * (life + 1))  # noqa: B023  awaited before the next turn
            running.service.stop.set()
            assert await running.wait_end() == "stopped by a signal"
            training.cancel()
    record.check(world_size=1, batch_size=8)
    assert {line["version"] - step for (step, _), line in record.batches.items()} == {-1}
    with JournalReader(tmp_path / "run") as reader:
        kept = [row.step for row in reader.batches() if row.kept]
        assert set(reader.counters()["dice"]) == {"finished", "batched"}
    assert len(kept) <= int(config.trainer.keep_batches) + 4, "the journal must not grow with the run"


async def test_a_batch_is_served_only_once_it_is_on_disk(
    tmp_path: Path, policy: str, record: TrainerRecord
) -> None:
    """While the disk keeps the journal waiting, a batch that is formed is not given to a trainer that waits for it."""
    gate = tmp_path / "gate"
    config = make_config(tmp_path / "run", policy, [env("Gated", args={"gate": str(gate)})])
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        training = group.create_task(train_here(running.address, record))
        await until(lambda: any(rank.waiting for rank in running.service.server.ranks))
        await running.service.journal.flush()
        database = sqlite3.connect(tmp_path / "run" / "journal" / "journal.sqlite3", isolation_level=None)
        try:
            # Nobody else can write now.
            database.execute("BEGIN IMMEDIATE")
            gate.touch()
            await until(lambda: running.service.run.parts.versions.formed == 2)
            assert (running.service.server.leased, record.last_step) == ([], 0)
        finally:
            database.close()
        await until(lambda: record.last_step >= 2)
        training.cancel()


async def test_a_fresh_run_starts_over_and_keeps_the_old_journal(
    tmp_path: Path, policy: str, record: TrainerRecord
) -> None:
    """Steps begin at 1 again, and nothing of the earlier run is mixed into what is written."""
    config = make_config(
        tmp_path / "run", policy, [env("Dice")], max_steps=2, eval={"env": [env("Chat", num_examples=2)]}
    )
    for fresh in (False, True):
        record = TrainerRecord()
        async with running_service(config, fresh=fresh) as running, asyncio.TaskGroup() as group:
            group.create_task(train_here(running.address, record))
            await running.wait_end()
        assert record.last_step == 2
    assert (tmp_path / "run" / "journal.old-1").is_dir()
    written = [json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()]
    assert [result["step"] for result in written] == [0, 2]


# --- staleness --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_versions", [0, 2])
async def test_a_slow_trainer_wastes_no_finished_rollout_under_pace(
    tmp_path: Path, policy: str, record: TrainerRecord, max_versions: int
) -> None:
    """Quick envs ahead of a slow trainer: nothing becomes too old, by the trainer's own record and by the ledger."""
    config = make_config(
        tmp_path / "run",
        policy,
        [env("Dice"), env("Ranked", args={"latency_s": 0.02})],
        staleness={"max_versions": max_versions},
    )
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        run = running.service.run
        training = group.create_task(train_here(running.address, record, think_s=0.08))
        await until(lambda: record.last_step >= 15)
        assert all(not facts.dropped for facts in run.parts.facts.envs.values())
        assert run.parts.ledger.totals()["cancelled"] == run.parts.ledger.totals()["failed"] == 0
        training.cancel()
    with JournalReader(tmp_path / "run") as reader:
        assert all(set(counts) <= {"finished", "batched"} for counts in reader.counters().values())
    assert record.oldest <= max_versions


async def test_a_trainer_never_gets_what_is_older_than_allowed(
    tmp_path: Path, policy: str, record: TrainerRecord
) -> None:
    """With drop, too: every sequence that the trainer was given is at most max_versions old."""
    config = make_config(
        tmp_path / "run",
        policy,
        [env("Dice", args={"latency_s": 0.01})],
        max_steps=15,
        staleness={"max_versions": 1, "mode": "drop"},
    )
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        group.create_task(train_here(running.address, record, think_s=0.05))
        await running.wait_end()
    record.check(world_size=1, batch_size=8)
    assert (record.last_step, record.oldest <= 1) == (15, True)


# --- evaluations ------------------------------------------------------------------------------------------------


async def test_evaluations_run_at_the_start_and_at_intervals(
    tmp_path: Path, policy: str, record: TrainerRecord
) -> None:
    """Their results are in evals.jsonl, in the journal and in the summary, with the step and version they are of."""
    config = make_config(
        tmp_path / "run",
        policy,
        [env("Dice")],
        max_steps=4,
        eval={"interval": 2, "env": [env("Chat", num_examples=3, rollouts_per_example=2)]},
    )
    file = tmp_path / "run" / "evals.jsonl"

    async def evaluated(step: int) -> None:
        """Every evaluation that is due before a step is done, so that none is put off by the one before."""
        while not file.exists() or file.read_text().count("\n") < 1 + (step - 1) // 2:  # noqa: ASYNC110  a file says nothing when it grows
            await asyncio.sleep(0.02)

    async with running_service(config) as running, asyncio.TaskGroup() as group:
        group.create_task(train_here(running.address, record, before_publishing=evaluated))
        await running.wait_end()
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [result["step"] for result in written] == [0, 2, 4]
    assert all((result["tasks"], result["k"], result["rollouts"]) == (3, 2, 6) for result in written)
    assert all(0 <= result["avg@2"] <= 1 for result in written)
    with JournalReader(tmp_path / "run") as reader:
        journaled = reader.evals()
    assert [{key: row[key] for key in written[0]} for row in journaled] == written
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["evals"] == written


async def test_the_last_evaluation_is_of_the_last_version_also_of_a_trainer_that_asks_ahead(
    tmp_path: Path, policy: str
) -> None:
    """Publishing the version before the last, with the last batch in hand already, does not say that the last one is trained on."""
    config = make_config(
        tmp_path / "run",
        policy,
        [env("Dice")],
        max_steps=3,
        eval={"interval": 3, "env": [env("Chat", num_examples=2)]},
    )
    async with running_service(config) as running:
        book = running.service.run.parts.versions
        async with AsyncTrainerClient(running.address, auto_ack=False) as trainer:
            assert (await anext(trainer)).step == 1
            for step in (1, 2, 3):
                if step < 3:
                    assert (await anext(trainer)).step == step + 1
                await trainer.publish(step)
                assert book.trained == step
                await trainer.ack(step)
        await running.wait_end()
    written = [json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()]
    assert [(result["step"], result["version"]) for result in written] == [(0, 0), (3, 3)]


async def test_a_continued_run_still_knows_its_earlier_evaluations(
    tmp_path: Path, policy: str, record: TrainerRecord
) -> None:
    """The summary has the results of every process of the run, none of them twice."""
    config = make_config(
        tmp_path / "run",
        policy,
        [env("Dice")],
        max_steps=4,
        eval={"interval": 2, "env": [env("Chat", num_examples=2)]},
    )
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        run = running.service.run

        async def evaluated(step: int) -> None:
            """No version comes before the first result, which would put the next evaluation off."""
            await until(lambda: bool(run.parts.eval_sink.results))

        training = group.create_task(train_here(running.address, record, before_publishing=evaluated))
        await evaluated(0)
        training.cancel()
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        group.create_task(train_here(running.address, record))
        await running.wait_end()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [result["step"] for result in summary["evals"]] == [0, 2, 4]


async def test_an_evaluation_overlaps_with_training(
    tmp_path: Path, policy: str, record: TrainerRecord
) -> None:
    """While its rollouts take their time training goes on; it is booked under the version it started with."""
    gate = tmp_path / "gate"
    config = make_config(
        tmp_path / "run",
        policy,
        [env("Dice")],
        eval={"interval": 1000, "env": [env("Gated", num_examples=2, args={"gate": str(gate)})]},
    )
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        run = running.service.run
        training = group.create_task(train_here(running.address, record))
        await until(lambda: run.parts.versions.serving >= 3)
        assert run.parts.eval_sink.results == []
        assert run.parts.ledger.inflight["eval", "eval-gated"] == 2  # type: ignore[index]  # a StrEnum is its text
        gate.touch()
        await until(lambda: bool(run.parts.eval_sink.results))
        assert (run.parts.eval_sink.results[0]["step"], run.parts.eval_sink.results[0]["version"]) == (0, 0)
        training.cancel()


# --- runs that cannot go on ---------------------------------------------------------------------------------------


async def test_a_run_in_which_nothing_can_be_trained_on_ends_with_env_and_reason(
    tmp_path: Path, policy: str
) -> None:
    """Groups without variance for max_barren_batches: the error names the env and why."""
    config = make_config(
        tmp_path / "run", policy, [env("Level")], dispatch={"max_barren_batches": 2, "max_inflight": 16}
    )
    with pytest.raises(StalledError, match=r'(?s)env "level": equal_rewards \(\d+ rollouts\)'):
        async with running_service(config) as running:
            await running.wait_end()


async def test_a_run_in_which_every_env_fails_ends_in_bounded_time(tmp_path: Path, policy: str) -> None:
    """With all envs only probed there is little to count, so time decides; the error tells the failures."""
    config = make_config(
        tmp_path / "run",
        policy,
        [env("Failing", "one"), env("Failing", "two")],
        dispatch={"stall_timeout_s": 1.0, "max_barren_batches": 100_000},
    )
    with pytest.raises(StalledError, match=r"every env has been failing for .*(one|two): error") as raised:
        async with running_service(config) as running:
            await running.wait_end()
    assert "one: error" in str(raised.value)
    assert "two: error" in str(raised.value)


async def fail_at_the_end(message: str) -> None:
    """A part that goes wrong when it is told to end."""
    try:
        await asyncio.Event().wait()
    finally:
        raise RuntimeError(message)


async def test_errors_that_come_together_with_the_end_of_a_run_are_reported(
    tmp_path: Path, policy: str
) -> None:
    """The run has ended as it should, so they do not change that; but they are said."""
    config = make_config(tmp_path / "run", policy, [env("Dice")])
    with capture_logs() as logs:
        async with start_service(config) as service:
            service.stop.set()
            assert await service.serve(fail_at_the_end("a window broke")) == "stopped by a signal"
    [failed] = [record for record in logs if record["event"] == "part.failed"]
    assert failed["error"] == "RuntimeError: a window broke"


async def test_of_several_errors_the_cause_ends_the_run_and_the_others_are_reported(
    tmp_path: Path, policy: str
) -> None:
    """An error of ours is more likely the cause than one that nobody foresaw."""

    async def fail() -> None:
        raise StalledError("nothing moves")

    config = make_config(tmp_path / "run", policy, [env("Dice")])
    with capture_logs() as logs, pytest.raises(StalledError, match="nothing moves"):
        async with start_service(config) as service:
            await service.serve(fail_at_the_end("a window broke"), fail())
    assert [record["error"] for record in logs if record["event"] == "part.failed"] == [
        "RuntimeError: a window broke"
    ]


# --- looking at it ------------------------------------------------------------------------------------------------


async def test_status_and_metrics_of_a_running_service(
    tmp_path: Path, policy: str, record: TrainerRecord
) -> None:
    """Over HTTP and with `orchestrator status`: the same numbers, and the books balance."""
    run_dir = tmp_path / "run"
    config = make_config(run_dir, policy, [env("Dice", ratio=0.75), env("Ranked", ratio=0.25)])
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        training = group.create_task(train_here(running.address, record))
        await until(lambda: running.service.run.parts.versions.trained >= 3)
        address = running.service.http_address
        assert address is not None
        async with aiohttp.ClientSession() as http:
            for path, text in (("/healthz", "ok\n"), ("/readyz", "running\n")):
                async with http.get(address + path) as reply:
                    assert (reply.status, await reply.text()) == (200, text)
            async with http.get(f"{address}/api/status") as reply:
                status = await reply.json()
            async with http.get(f"{address}/metrics") as reply:
                metrics = await reply.text()
        assert status["state"] == "running"
        assert status["envs"]["dice"]["target"] == 0.75
        assert status["step"] >= status["trained"] >= 3
        assert running.service.run.parts.ledger.balances()
        assert_balanced(metrics, {"dice", "ranked"})
        shown = await run_command("status", run_dir, logs=tmp_path / "logs")
        assert shown.process.returncode == 0, shown.errors()
        assert all(word in shown.stdout.read_text() for word in ("dice", "ranked", "state: running"))
        raw = await run_command("status", run_dir, "--json", logs=tmp_path / "logs")
        assert json.loads(raw.stdout.read_text())["trained"] >= 3
        training.cancel()
    gone = await run_command("status", run_dir, logs=tmp_path / "logs")
    assert gone.process.returncode == 1
    told = gone.stdout.read_text()
    assert "ended: stopped by a signal" in told
    assert re.search(r"step \d+, trained \d+, version \d+", told)


def assert_balanced(metrics: str, envs: set[str]) -> None:
    """dispatched = in flight + Σ outcomes, in the exposition text alone."""
    dispatched, ended, inflight = dict[str, float](), dict[str, float](), dict[str, float]()
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        for sums, metric in (
            (dispatched, "orchestrator_rollouts_dispatched_total{"),
            (ended, "orchestrator_rollouts_total{"),
            (inflight, "orchestrator_env_inflight{"),
        ):
            if name.startswith(metric):
                label = name.partition('env="')[2].partition('"')[0]
                sums[label] = sums.get(label, 0.0) + float(value)
    assert set(dispatched) == envs
    assert {label: dispatched[label] - ended.get(label, 0.0) for label in envs} == inflight
