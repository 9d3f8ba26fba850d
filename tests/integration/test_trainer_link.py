"""The trainer link with real sockets, real files and real processes: batches arrive, restarts and deaths do not matter."""

import asyncio
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs

from envs.curve import ServerKeys, generate_pair
from orchestrator.errors import TrainerLinkError
from orchestrator.groups.group import Batch
from orchestrator.trainer import AsyncTrainerClient, Publication, TrainerClient
from orchestrator.trainer.protocol import (
    PROTOCOL,
    Get,
    Join,
    Missing,
    Ok,
    Pong,
    Served,
    Welcome,
    decode_to_trainer,
    encode,
)
from orchestrator.trainer_link.publications import Loads
from tests.support.journal_groups import make_batch
from tests.support.journal_opening import open_journal
from tests.support.trainer_links import make_server
from tests.support.trainer_victim import digest
from tests.support.waiting import until
from tests.trainer.recorded import read_recorded, recorded_batch

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["zmq", "filesystem"])
def bind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address to serve at, of each transport."""
    return "tcp://127.0.0.1:*" if request.param == "zmq" else f"file://{tmp_path}/link"


@asynccontextmanager
async def victim(address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A trainer in a process of its own, gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.trainer_victim",
        address,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        # Reads to the end, so that no pipe is left open.
        await process.communicate()


async def line(process: asyncio.subprocess.Process) -> list[str]:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().split()


async def say(process: asyncio.subprocess.Process, word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n".encode())
    await process.stdin.drain()


async def test_two_ranks_train_on_every_step_in_order_until_the_run_is_over(bind: str) -> None:
    """Each batch reaches both ranks in equal shares; both learn why it ended."""
    acked: list[int] = []
    seen: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    ended: dict[int, str | None] = {}

    def train(address: str, rank: int) -> None:
        with TrainerClient(address, rank=rank, world_size=2) as trainer:
            for batch in trainer:
                seen[rank].append((batch.step, len(batch)))
            ended[rank] = trainer.finished

    async with make_server(bind=bind, world_size=2, on_ack=acked.append) as server:
        async with asyncio.TaskGroup() as ranks:
            for rank in (0, 1):
                ranks.create_task(asyncio.to_thread(train, server.address, rank))
            for step in range(1, 6):
                server.offer(make_batch(step))
            await until(lambda: acked == [1, 2, 3, 4, 5])
            server.finish("max_steps")
        assert await server.wait_told(10)
    assert seen == {rank: [(step, 4) for step in range(1, 6)] for rank in (0, 1)}
    assert ended == {0: "max_steps", 1: "max_steps"}


async def test_the_async_client_does_the_same(bind: str) -> None:
    """Iteration, acknowledgement by going on, publication."""
    versions: list[tuple[int, str | None]] = []
    acked: list[int] = []
    async with make_server(
        bind=bind, world_size=1, on_ack=acked.append, on_publish=lambda v, p: versions.append((v, p))
    ) as server:
        for step in (1, 2, 3):
            server.offer(make_batch(step))
        server.finish("done")
        steps = []
        async with AsyncTrainerClient(server.address) as trainer:
            async for batch in trainer:
                steps.append(batch.step)
                assert acked == steps[:-1]
                assert await trainer.publish(batch.step, f"ckpt/{batch.step}") == Publication(batch.step)
            assert "before" in (await trainer.publish(3)).note
        assert steps == acked == [1, 2, 3]
        assert versions == [(step, f"ckpt/{step}") for step in (1, 2, 3)]


async def test_a_trainer_may_have_several_batches_in_hand_and_acknowledge_by_itself(bind: str) -> None:
    """With auto_ack=False nothing is acknowledged that was not said, not by going on and not by leaving."""
    acked: list[int] = []
    async with make_server(bind=bind, world_size=1, on_ack=acked.append) as server:
        for step in (1, 2, 3):
            server.offer(make_batch(step))
        async with AsyncTrainerClient(server.address, auto_ack=False) as trainer:
            assert [(await anext(trainer)).step for _ in range(3)] == [1, 2, 3]
            assert acked == []
            await trainer.ack(1)
            assert acked == [1]
        assert acked == [1]
        async with AsyncTrainerClient(server.address, auto_ack=False) as trainer:
            assert (await anext(trainer)).step == 2


@pytest.mark.parametrize(("options", "booked"), [({}, []), ({"step": 1}, [1])])
async def test_a_version_is_never_of_a_batch_that_was_only_taken(
    bind: str, options: dict[str, int], booked: list[int]
) -> None:
    """A loop that has two batches in hand publishes what came of the first: the second is not trained on. Without a word the
    version's own number says of which step it is.
    """
    trained: list[int] = []
    async with make_server(bind=bind, world_size=1, on_trained=trained.append) as server:
        for step in (1, 2):
            server.offer(make_batch(step))
        async with AsyncTrainerClient(server.address, auto_ack=False) as trainer:
            assert [(await anext(trainer)).step for _ in range(2)] == [1, 2]
            await trainer.publish(1, "ckpt/1", **options)
            assert trained == booked
            async with trainer.updating(2, **options):
                pass
            assert trained == booked * 2


async def test_received_arrays_are_writable_and_the_batch_can_be_had_again_unchanged(bind: str) -> None:
    """Writing into a batch changes nobody else's."""
    async with make_server(bind=bind, world_size=1) as server:
        server.offer(make_batch(1, groups=40))
        async with AsyncTrainerClient(server.address) as trainer:
            batch = await trainer.next_batch()
            assert batch is not None
            before = digest(batch)
            for array in (batch.tokens, batch.mask, batch.logprobs, batch.rewards, batch.sequence_advantages):
                assert array.flags.writeable
                assert array.flags.aligned
                array[:] = 1
            assert digest(await trainer.get(1)) == before != digest(batch)


async def test_both_transports_give_the_same_bytes(tmp_path: Path) -> None:
    """The encoding does not depend on the way."""
    digests = set()
    for address in ("tcp://127.0.0.1:*", f"file://{tmp_path}/link"):
        async with make_server(bind=address, world_size=2, last_step=3) as server:
            server.offer(make_batch(4))
            async with AsyncTrainerClient(server.address, rank=1, world_size=2) as trainer:
                batch = await trainer.next_batch()
                assert batch is not None
                digests.add(digest(batch))
    assert len(digests) == 1


async def test_a_batch_in_hand_is_acknowledged_by_leaving_well_and_only_so(bind: str) -> None:
    """`break` and leaving the block acknowledges; an exception does not."""
    acked: list[int] = []
    async with make_server(bind=bind, world_size=1, on_ack=acked.append) as server:
        for step in (1, 2):
            server.offer(make_batch(step))

        async def fail() -> None:
            async with AsyncTrainerClient(server.address) as trainer:
                async for batch in trainer:
                    raise ZeroDivisionError(batch.step)

        with pytest.raises(ZeroDivisionError, match="1"):
            await fail()
        assert acked == []
        async with AsyncTrainerClient(server.address) as trainer:
            async for batch in trainer:
                assert batch.step == 1
                break
        assert acked == [1]
        async with AsyncTrainerClient(server.address) as trainer:
            async for batch in trainer:
                assert batch.step == 2
                await trainer.ack(2)
                assert acked == [1, 2]
                break


async def test_a_trainer_killed_before_it_acknowledged_gets_the_same_batch_again(bind: str) -> None:
    """And one killed after gets the next one."""
    async with make_server(bind=bind, world_size=1) as server:
        for step in (1, 2, 3):
            server.offer(make_batch(step))
        async with victim(server.address) as process:
            assert await line(process) == ["joined"]
            first = await line(process)
            process.kill()
            await process.wait()
        async with victim(server.address) as process:
            assert await line(process) == ["joined"]
            assert await line(process) == first
            await say(process, "ack")
            assert await line(process) == ["acked", "1"]
            process.kill()
            await process.wait()
        async with victim(server.address) as process:
            assert await line(process) == ["joined"]
            assert (await line(process))[:2] == ["batch", "2"]
        assert server.leased == [2, 3]


async def test_a_rank_that_dies_is_noticed(tmp_path: Path) -> None:
    """The service says so and does not count it as connected."""
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, probe_s=0.05) as server:
        async with victim(server.address) as process:
            assert await line(process) == ["joined"]
            assert [rank.pid for rank in server.ranks] == [process.pid]
            with capture_logs() as logs:
                process.kill()
                await until(lambda: server.ranks == [])
        assert [entry["event"] for entry in logs] == ["trainer.rank_lost"]


async def test_ctrl_c_interrupts_a_waiting_trainer(bind: str) -> None:
    """A synchronous wait for a batch ends with KeyboardInterrupt, and the rank leaves in good order."""
    async with make_server(bind=bind, world_size=1) as server, victim(server.address) as process:
        assert await line(process) == ["joined"]
        await until(lambda: any(rank.waiting for rank in server.ranks))
        process.send_signal(signal.SIGINT)
        assert await process.wait() == -signal.SIGINT
        await until(lambda: server.ranks == [])


async def test_a_waiting_trainer_survives_a_restart_of_the_service(bind: str) -> None:
    """It joins again by itself and asks again for what it was waiting for; nothing is repeated or left out."""
    steps: list[int] = []
    acked: list[int] = []

    def train(address: str) -> None:
        with TrainerClient(address, ping_s=0.05) as trainer:
            steps.extend(batch.step for batch in trainer)

    async with asyncio.TaskGroup() as group:
        async with make_server(bind=bind, world_size=1, run="r", on_ack=acked.append) as first:
            first.offer(make_batch(1))
            group.create_task(asyncio.to_thread(train, first.address))
            await until(lambda: any(rank.waiting for rank in first.ranks))
        second = make_server(bind=first.address, world_size=1, run="r", last_step=1, on_ack=acked.append)
        second.offer(make_batch(2))
        async with second:
            await until(lambda: acked == [1, 2])
            second.finish("max_steps")
            await until(lambda: second.ranks == [])
    assert steps == [1, 2]


async def test_what_was_said_while_the_service_was_away_arrives(bind: str) -> None:
    """A publication and an acknowledgement wait for the service to come back."""
    versions: list[int] = []
    acked: list[int] = []
    async with AsyncExitStack() as stack:
        async with make_server(bind=bind, world_size=1, run="r") as first:
            first.offer(make_batch(1))
            trainer = await stack.enter_async_context(AsyncTrainerClient(first.address, ping_s=0.05))
            assert await trainer.next_batch()
        async with asyncio.TaskGroup() as group:
            published = group.create_task(trainer.publish(1, "ckpt"))
            await asyncio.sleep(0)
            second = make_server(
                bind=first.address,
                world_size=1,
                run="r",
                on_ack=acked.append,
                on_publish=lambda version, path: versions.append(version),
            )
            second.restore(make_batch(1), ())
            async with second:
                assert await published == Publication(1)
                await trainer.ack(1)
                assert (versions, acked) == ([1], [1])
                await stack.aclose()
                await until(lambda: second.ranks == [])


async def test_a_trainer_of_another_run_is_not_served(bind: str) -> None:
    """A fresh run at the same address is not taken for the old one."""
    async with AsyncExitStack() as stack:
        async with make_server(bind=bind, world_size=1, run="old") as first:
            trainer = await stack.enter_async_context(AsyncTrainerClient(first.address, ping_s=0.05))
        async with make_server(bind=first.address, world_size=1, run="new"):
            with pytest.raises(TrainerLinkError, match="now serves run new, rank 0 trains on run old"):
                await trainer.next_batch()


async def test_the_newest_process_of_a_rank_wins_and_the_old_one_raises(bind: str) -> None:
    """The old one is told who took its place."""
    async with (
        make_server(bind=bind, world_size=1) as server,
        AsyncTrainerClient(server.address, ping_s=0.05) as old,
        AsyncTrainerClient(server.address) as new,
    ):
        server.offer(make_batch(1))
        assert (await anext(new)).step == 1
        with pytest.raises(TrainerLinkError, match="a newer process has joined as rank 0"):
            await old.next_batch()


async def test_a_wrong_world_size_is_refused_with_both_numbers(bind: str) -> None:
    """Before any batch is served."""
    async with make_server(bind=bind, world_size=4) as server:
        with pytest.raises(TrainerLinkError, match=r"rank 0 of world size 2, .* world size 4"):
            async with AsyncTrainerClient(server.address, rank=0, world_size=2):
                pytest.fail("joined")


async def test_a_trainer_that_restarts_with_another_world_size_loses_nothing(bind: str) -> None:
    """It is told what to do, and what the ranks before it had not acknowledged is still theirs."""
    async with make_server(bind=bind, world_size=1) as server:
        server.offer(make_batch(1))
        async with AsyncTrainerClient(server.address, auto_ack=False) as trainer:
            first = await anext(trainer)
        for rank in (0, 1):
            with pytest.raises(
                TrainerLinkError, match=r"start as many ranks, or restart .* trainer.world_size"
            ):
                async with AsyncTrainerClient(server.address, rank=rank, world_size=2):
                    pytest.fail("joined")
        async with AsyncTrainerClient(server.address) as trainer:
            again = await anext(trainer)
        assert (again.step, again.tokens.tolist()) == (first.step, first.tokens.tolist())


async def test_a_rank_that_dies_between_publishing_and_acknowledging_gets_the_batch_again(bind: str) -> None:
    """The version counts once; publishing it again is said to change nothing, and the batch is done with then."""
    acked: list[int] = []
    published: list[int] = []
    async with make_server(
        bind=bind,
        world_size=1,
        on_ack=acked.append,
        on_publish=lambda version, path: published.append(version),
    ) as server:
        server.offer(make_batch(1))

        async def dies() -> None:
            async with AsyncTrainerClient(server.address) as trainer:
                assert (await anext(trainer)).step == 1
                await trainer.publish(1, "ckpt/1")
                raise RuntimeError("killed")

        with pytest.raises(RuntimeError, match="killed"):
            await dies()
        assert (server.leased, acked) == ([1], [])
        async with AsyncTrainerClient(server.address) as trainer:
            assert (await anext(trainer)).step == 1
            assert (await trainer.publish(1, "ckpt/1")).note
        assert (published, acked) == ([1], [1])


async def test_silence_is_an_error_that_names_the_address(tmp_path: Path) -> None:
    """After `timeout_s` without an answer, for both clients and both transports."""
    for address in (f"ipc://{tmp_path}/nobody", f"file://{tmp_path}/nobody"):
        with pytest.raises(TrainerLinkError, match=r"no orchestrator has answered at .*nobody for"):
            async with AsyncTrainerClient(address, timeout_s=0.2):
                pytest.fail("joined")

        def join(address: str) -> None:
            with TrainerClient(address, timeout_s=0.2):
                pytest.fail("joined")

        with pytest.raises(TrainerLinkError, match="is it running"):
            await asyncio.to_thread(join, address)


@pytest.mark.parametrize("prefetch", [True, False])
async def test_last_words_after_the_end_are_waited_for_no_longer_than_the_service(
    bind: str, prefetch: bool
) -> None:
    """The last batch is acknowledged, the run ends and its service leaves while the trainer still saves its checkpoint."""
    acked: list[int] = []

    def end(trainer: TrainerClient) -> None:
        began = time.monotonic()
        trainer.report(1, {"loss": 0.5})
        trainer.checkpointed(1)
        assert trainer.next_batch() is None
        assert trainer.finished == "max_steps"
        trainer.done()
        with pytest.raises(
            TrainerLinkError, match=r"the run is over \(max_steps\) and its orchestrator has left"
        ):
            trainer.publish(2, "ckpt/2")
        trainer.__exit__(None, None, None)
        assert time.monotonic() - began < 60, "a service that has left is waited for like one that restarts"

    async with make_server(bind=bind, world_size=1, on_ack=acked.append) as server:
        server.offer(make_batch(1))
        trainer = TrainerClient(server.address, auto_ack=False, prefetch=prefetch)
        await asyncio.to_thread(trainer.__enter__)
        assert await asyncio.to_thread(trainer.next_batch)
        await asyncio.to_thread(trainer.ack, 1)
        server.finish("max_steps")
        assert await server.wait_told(0.2) == prefetch
    await asyncio.to_thread(end, trainer)


async def test_a_run_that_goes_on_after_its_end_is_waited_for_again(bind: str) -> None:
    """With more steps the same run is served once more: a rank that was told of the end joins, and waits as ever."""
    async with make_server(bind=bind, world_size=1, run="r") as first:
        trainer = AsyncTrainerClient(first.address, ping_s=0.05)
        await trainer.__aenter__()
        first.finish("max_steps")
        assert await trainer.next_batch() is None
    async with make_server(bind=first.address, world_size=1, run="r") as second:
        waiting = asyncio.create_task(trainer.next_batch())
        await until(lambda: any(rank.waiting for rank in second.ranks))
        second.offer(make_batch(1))
        batch = await waiting
        assert batch is not None
        assert batch.step == 1
        await trainer.__aexit__(None, None, None)


async def test_a_late_rank_gets_what_the_others_have_had(bind: str) -> None:
    """A batch waits for all ranks, however late."""
    acked: list[int] = []
    async with make_server(bind=bind, world_size=2, on_ack=acked.append) as server:
        for step in (1, 2):
            server.offer(make_batch(step))
        server.finish("max_steps")
        async with AsyncTrainerClient(server.address, rank=0, world_size=2) as early:
            assert [batch.step async for batch in early] == [1, 2]
        assert server.leased == [1, 2]
        async with AsyncTrainerClient(server.address, rank=1, world_size=2) as late:
            assert [batch.step async for batch in late] == [1, 2]
        assert acked == [1, 2]


async def test_a_trainer_that_fell_back_to_its_checkpoint_goes_on_behind_it(bind: str) -> None:
    """`resume_after` asks again for kept batches; those that are gone are named."""
    async with make_server(bind=bind, world_size=1, keep=2) as server:
        for step in (1, 2, 3, 4):
            server.offer(make_batch(step))
        server.finish("max_steps")
        async with AsyncTrainerClient(server.address) as trainer:
            assert [batch.step async for batch in trainer] == [1, 2, 3, 4]
        async with AsyncTrainerClient(server.address, resume_after=2) as trainer:
            assert [batch.step async for batch in trainer] == [3, 4]
        async with AsyncTrainerClient(server.address, resume_after=0) as trainer:
            with pytest.raises(TrainerLinkError, match="step 1 is no longer kept"):
                await trainer.next_batch()


async def test_prefetching_asks_ahead_and_changes_nothing_else(bind: str) -> None:
    """The next batch is on its way while the last one is trained on."""
    acked: list[int] = []
    async with (
        make_server(bind=bind, world_size=1, on_ack=acked.append) as server,
        AsyncTrainerClient(server.address, prefetch=True) as trainer,
    ):
        server.offer(make_batch(1))
        assert (await anext(trainer)).step == 1
        await until(lambda: any(rank.waiting for rank in server.ranks))
        assert acked == []
        server.offer(make_batch(2))
        assert (await anext(trainer)).step == 2
        assert acked == [1]


async def test_what_was_asked_for_ahead_is_forgotten_when_a_trainer_goes_back(bind: str) -> None:
    """The next batch is the one behind the step that it names, whatever had been asked for, or had come."""
    async with make_server(bind=bind, world_size=1, keep=4) as server:
        for step in (1, 2, 3):
            server.offer(make_batch(step))
        async with AsyncTrainerClient(server.address, prefetch=True) as trainer:
            assert [(await anext(trainer)).step for _ in range(3)] == [1, 2, 3]
            trainer.resume_after(1)
            assert [(await anext(trainer)).step for _ in range(2)] == [2, 3]


async def test_an_interrupted_wait_for_a_batch_goes_on_with_the_next_call(bind: str) -> None:
    """A cancelled `next_batch` loses nothing."""
    async with make_server(bind=bind, world_size=1) as server, AsyncTrainerClient(server.address) as trainer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await trainer.next_batch()
        server.offer(make_batch(1))
        assert (await anext(trainer)).step == 1


async def test_done_reaches_the_service(bind: str) -> None:
    """The trainer may end the run."""
    said: list[str] = []
    async with make_server(bind=bind, world_size=1, on_done=lambda: said.append("done")) as server:
        async with AsyncTrainerClient(server.address) as trainer:
            await trainer.done()
        assert said == ["done"]


async def test_an_address_in_use_is_an_error_that_names_it() -> None:
    """One line for the user, nothing left open."""
    async with make_server(bind="tcp://127.0.0.1:*", world_size=1) as server:
        with pytest.raises(TrainerLinkError, match=r"cannot listen at tcp://127.0.0.1:\d+"):
            async with make_server(bind=server.address, world_size=1):
                pytest.fail("bound twice")


async def test_only_trainers_with_a_known_key_are_let_in() -> None:
    """CURVE: the right pair joins, an unknown pair and no key at all hear nothing."""
    ours, theirs, strangers = generate_pair(), generate_pair(), generate_pair()
    keys = ServerKeys(ours, clients=(theirs.public,))
    async with make_server(bind="tcp://127.0.0.1:*", world_size=1, keys=keys) as server:
        server.offer(make_batch(1))

        def client(public: str, secret: str, timeout_s: float) -> AsyncTrainerClient:
            return AsyncTrainerClient(
                server.address,
                timeout_s=timeout_s,
                server_key=ours.public.encode(),
                public_key=public.encode(),
                secret_key=secret.encode(),
            )

        async with client(theirs.public, theirs.secret, 30) as trainer:
            assert (await anext(trainer)).step == 1
        with pytest.raises(TrainerLinkError, match="are the address and the keys right"):
            async with client(strangers.public, strangers.secret, 0.3):
                pytest.fail("joined with an unknown key")
        with pytest.raises(TrainerLinkError, match="are the address and the keys right"):
            async with AsyncTrainerClient(server.address, timeout_s=0.3):
                pytest.fail("joined without a key")


async def test_nonsense_on_the_socket_does_not_disturb_the_service() -> None:
    """It is answered with a refusal; ranks are served as before."""
    async with make_server(bind="tcp://127.0.0.1:*", world_size=1) as server:
        server.offer(make_batch(1))
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(server.address)
        socket.send_multipart([b"\xc1", b"what"])
        await asyncio.to_thread(socket.poll)
        assert b"refused" in socket.recv()
        socket.close(0)
        context.term()
        async with AsyncTrainerClient(server.address) as trainer:
            assert (await anext(trainer)).step == 1


async def test_what_a_trainer_was_told_holds_after_a_crash(tmp_path: Path) -> None:
    """With the journal behind it: an answered ack is on disk, and the batch is the same when served again."""
    address = f"ipc://{tmp_path}/s"
    async with open_journal(tmp_path / "run") as journal:
        for step in (1, 2):
            for group in make_batch(step).groups:
                journal.record_group(group)
        server = make_server(
            bind=address,
            world_size=1,
            run=journal.run_id,
            keep=0,
            load=journal.load_batch,
            when_durable=journal.when_durable,
            on_rank_ack=lambda step, rank: journal.record_ack(step, rank, world_size=1),
            on_ack=journal.record_acknowledged,
        )
        async with server:
            for step in (1, 2):
                batch = make_batch(step)
                journal.record_batch(batch, lambda batch=batch: server.offer(batch))  # type: ignore[misc] # binds the loop's value
            async with AsyncTrainerClient(address) as trainer:
                first = await trainer.next_batch()
                assert first is not None
                await trainer.ack(1)
                with_journal = journal.recover()
                assert with_journal.last_acknowledged == 1
                # No longer in memory: read back from the journal.
                assert digest(await trainer.get(1)) == digest(first)
                second = await trainer.next_batch()
                assert second is not None
                digest_of_second = digest(second)
                trainer._in_hand = None
    async with open_journal(tmp_path / "run") as journal:
        again = journal.recover(world_size=1)
        server = make_server(bind=address, world_size=1, run=journal.run_id, last_step=again.last_step)
        for batch in again.batches:
            if batch.step not in again.acknowledged:
                server.restore(batch, again.acks.get(batch.step, ()))
        assert server.leased == [2]
        async with server, AsyncTrainerClient(address) as trainer:
            assert digest(await anext(trainer)) == digest_of_second


async def test_a_version_that_cannot_be_loaded_is_an_error_where_it_is_published(bind: str) -> None:
    """With the reason; nothing is recorded, and the trainer may go on and publish another."""
    published: list[tuple[int, str | None]] = []

    def check(version: int, path: str | None, decided: Callable[[str], None]) -> None:
        reason = "" if path == "good" else f"{path} holds no weights"
        asyncio.get_running_loop().call_soon(decided, reason)

    async with (
        make_server(
            bind=bind, world_size=1, check_version=check, on_publish=lambda v, p: published.append((v, p))
        ) as server,
        AsyncTrainerClient(server.address) as trainer,
    ):
        with pytest.raises(TrainerLinkError, match="spoiled holds no weights"):
            await trainer.publish(1, "spoiled")
        assert published == []
        assert await trainer.publish(1, "good") == Publication(1)
        assert published == [(1, "good")]


async def test_a_publication_can_wait_for_the_engines(bind: str) -> None:
    """It is answered when the service knows, with what is known of each; a version that is refused after all is an error."""
    outcomes = {
        1: ("", {"http://a": "", "http://b": ""}),
        2: ("", {"http://a": "", "http://b": "was restarted"}),
        3: ("version 3 could not be loaded: torn", {}),
    }
    waits: list[tuple[int, float]] = []

    def wait(version: int, wait_s: float, then: Loads) -> None:
        waits.append((version, wait_s))
        asyncio.get_running_loop().call_soon(then, *outcomes[version])

    async with make_server(bind=bind, world_size=1, wait_loaded=wait) as server:
        async with AsyncTrainerClient(server.address) as trainer:
            assert not (await trainer.publish(0, "ckpt")).loaded_everywhere
            assert waits == []
            first = await trainer.publish(1, "ckpt", wait_s=30)
            assert (first.note, first.engines, first.loaded_everywhere) == ("", outcomes[1][1], True)
        address = server.address

        def blocking() -> Publication:
            with TrainerClient(address) as trainer:
                return trainer.publish(2, "ckpt", wait_s=7.5)

        second = await asyncio.to_thread(blocking)
        assert (second.engines, second.loaded_everywhere) == (outcomes[2][1], False)
        async with AsyncTrainerClient(server.address) as trainer:
            again = await trainer.publish(2, "ckpt", wait_s=1)
            assert ("was published before" in again.note, again.engines) == (True, outcomes[2][1])
            with pytest.raises(TrainerLinkError, match="torn"):
                await trainer.publish(3, "ckpt", wait_s=1)
    assert waits == [(1, 30), (2, 7.5), (2, 1), (3, 1)]


async def test_a_rank_that_dies_while_its_version_is_checked_holds_up_nobody(tmp_path: Path) -> None:
    """The decision is made without it; its next process is told that it was published before."""
    checks: list[Callable[[str], None]] = []
    published: list[int] = []
    server = make_server(
        bind=f"ipc://{tmp_path}/s",
        world_size=1,
        probe_s=0.05,
        check_version=lambda version, path, decided: checks.append(decided),
        on_publish=lambda version, path: published.append(version),
    )
    async with server:
        async with AsyncTrainerClient(server.address) as first:
            publishing = asyncio.create_task(first.publish(1, "ckpt"))
            await until(lambda: checks)
            publishing.cancel()
            await asyncio.wait([publishing])
        await until(lambda: server.ranks == [])
        checks[0]("")
        assert published == [1]
        async with AsyncTrainerClient(server.address) as second:
            assert "was published before" in (await second.publish(1, "ckpt")).note
        assert len(checks) == 1


async def test_a_decision_after_the_end_is_not_recorded(bind: str) -> None:
    """A check may take longer than the run."""
    checks: list[Callable[[str], None]] = []
    published: list[int] = []
    async with make_server(
        bind=bind,
        world_size=1,
        check_version=lambda version, path, decided: checks.append(decided),
        on_publish=lambda version, path: published.append(version),
    ) as server:
        server.publish(1, "ckpt")
    checks[0]("")
    assert published == []


async def test_a_batch_that_cannot_be_read_or_encoded_is_an_answer_with_the_reason(bind: str) -> None:
    """The rank does not wait for ever, and the log has the error."""

    def load(step: int) -> Batch:
        raise ZeroDivisionError(f"the page of step {step} is torn")

    async with (
        make_server(bind=bind, world_size=3, last_step=5, load=load) as server,
        AsyncTrainerClient(server.address, rank=1, world_size=3) as trainer,
    ):
        server.keep(make_batch(6))
        with capture_logs() as logs:
            with pytest.raises(
                TrainerLinkError, match="step 4 cannot be served to rank 1 of 3: the page of step 4"
            ):
                await trainer.get(4)
            with pytest.raises(TrainerLinkError, match="8 sequences cannot be shared evenly by 3 ranks"):
                await trainer.get(6)
        assert [entry["event"] for entry in logs] == ["trainer.batch_failed"] * 2


async def test_a_rank_that_asks_for_more_than_it_takes_is_told_to_wait() -> None:
    """What waits for the encoder is bounded, and nothing is left unanswered."""
    held = threading.Event()

    def load(step: int) -> Batch:
        held.wait(30)
        return make_batch(step)

    async with make_server(bind="tcp://127.0.0.1:*", world_size=1, last_step=50, load=load) as server:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(server.address)
        socket.send(encode(Join(PROTOCOL, 0, 1, "greedy")))
        for step in range(1, 41):
            socket.send(encode(Get(step, step)))
        answers = [await asyncio.to_thread(socket.recv_multipart) for _ in range(33)]
        held.set()
        answers += [await asyncio.to_thread(socket.recv_multipart) for _ in range(8)]
        kinds = Counter(type(decode_to_trainer(frames[0])) for frames in answers)
        assert kinds == {Welcome: 1, Missing: 32, Served: 8}
        socket.close(0)
        context.term()


async def test_a_token_lets_in_those_who_have_it(bind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given or from the environment; others are told what is missing."""
    async with make_server(bind=bind, world_size=1, token="secret") as server:
        with pytest.raises(TrainerLinkError, match="presented no token"):
            async with AsyncTrainerClient(server.address):
                pytest.fail("joined without the token")
        async with AsyncTrainerClient(server.address, token="secret"):
            assert len(server.ranks) == 1
        monkeypatch.setenv("ORCHESTRATOR_TRAINER_TOKEN", "secret")
        async with AsyncTrainerClient(server.address):
            assert len(server.ranks) == 1
        with pytest.raises(TrainerLinkError, match="presented another token"):
            async with AsyncTrainerClient(server.address, token="other"):
                pytest.fail("joined with another token")


async def test_a_socket_in_a_directory_of_its_own_is_private(tmp_path: Path) -> None:
    """The service makes the directory for this user alone; one that is there is left as it is."""
    private, shared = tmp_path / "private", tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    for directory, mode in ((private, 0o700), (shared, 0o755)):
        async with make_server(bind=f"ipc://{directory}/sock", world_size=1) as server:
            server.offer(make_batch(1))
            assert directory.stat().st_mode & 0o777 == mode
            async with AsyncTrainerClient(f"ipc://{directory}/sock") as trainer:
                assert (await anext(trainer)).step == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerLinkError, match="cannot listen at ipc://"):
        async with make_server(bind=f"ipc://{tmp_path}/file/sock", world_size=1):
            pytest.fail("bound below a file")


async def test_a_trainer_of_the_first_protocol_is_served_to_the_last_byte() -> None:
    """Its recorded messages get the recorded batch."""
    acked: list[tuple[int, int]] = []
    async with make_server(
        bind="tcp://127.0.0.1:*",
        world_size=2,
        last_step=2,
        on_rank_ack=lambda step, rank: acked.append((step, rank)),
    ) as server:
        server.offer(recorded_batch())
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(server.address)
        answers = []
        for name in ("join", "next", "ack", "publish", "ping", "done"):
            socket.send(bytes(read_recorded(name)[0]))
            answers.append(await asyncio.to_thread(socket.recv_multipart))
        socket.send(bytes(read_recorded("leave")[0]))
        await until(lambda: server.ranks == [])
        socket.close(0)
        context.term()
    heads = [decode_to_trainer(frames[0]) for frames in answers]
    assert heads == [Welcome(1, "", 2, after=2, version=0), Served(1, 3), Ok(3), Ok(4), Pong(), Ok(6)]
    assert answers[1][1:] == [bytes(frame) for frame in read_recorded("served_1")[1:]]
    assert acked == [(3, 1)]
