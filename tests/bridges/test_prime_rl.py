"""Batches as files for prime-rl's trainer, and its broadcasts as acknowledgements, against what is known of its format."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.bridges.prime_rl import Exchange, run_bridge
from orchestrator.bridges.prime_rl_format import share_out
from orchestrator.errors import ConfigError, TrainerLinkError
from orchestrator.trainer import AsyncTrainerClient
from orchestrator.trainer_link.server import BatchServer
from tests.support.journal_groups import make_batch
from tests.support.trainer_links import make_server
from tests.support.waiting import until
from tests.trainer.test_layout import sequences_of

POLL_S = 0.01


def read_batch(out: Path, step: int, rank: int) -> list[list[Any]]:
    """A rank's micro-batches, as its trainer decodes them."""
    found: list[list[Any]] = msgspec.msgpack.decode(
        (out / "rollouts" / f"step_{step}" / f"rank_{rank}.bin").read_bytes()
    )
    return found


def broadcast(out: Path, step: int) -> Path:
    folder = out / "broadcasts" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "STABLE").touch()
    return folder


def contents(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*.bin")}


def leftovers(out: Path) -> list[Path]:
    return list(out.rglob("*.tmp"))


@asynccontextmanager
async def bridge(server: BatchServer, out: Path, ranks: int = 2) -> AsyncIterator["asyncio.Task[None]"]:
    """A bridge that is killed when the block is left: it says and does nothing more."""
    exchange = Exchange(out, ranks=ranks, max_tokens=64)
    client = AsyncTrainerClient(server.address, auto_ack=False)
    task = asyncio.create_task(run_bridge(client, exchange, poll_s=POLL_S))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 5), st.integers(20, 60))
def test_every_rank_gets_as_many_micro_batches_and_every_token_is_trained_on_once(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    """What fills up has a mask of nothing and no advantage; both lists of lengths sum to the tokens."""
    sequences = sequences_of(lengths)
    shares = share_out(sequences, ranks, max_tokens)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    expected = {
        int(token): (bool(mask), float(advantage), float(logprob), place)
        for sequence in sequences
        for place, (token, mask, advantage, logprob) in enumerate(
            zip(sequence.tokens, sequence.mask, sequence.advantages, sequence.logprobs, strict=True)
        )
    }
    heats = {
        int(token): sequence.temperature or 1.0
        for sequence in sequences
        for token in sequence.tokens.tolist()
    }
    seen: dict[int, tuple[bool, float, float, int]] = {}
    trained = 0
    for micro in (micro for share in shares for micro in share):
        rows = zip(
            micro.input_ids,
            micro.loss_mask,
            micro.advantages,
            micro.inference_logprobs,
            micro.position_ids,
            micro.temperatures,
            micro.env_names,
            strict=True,
        )
        assert sum(micro.sequence_lengths) == sum(micro.seq_lens) == len(micro.input_ids)
        assert len(micro.input_ids) <= max_tokens or len(micro.seq_lens) == 1
        fills = not any(micro.advantages) and not any(micro.loss_mask)
        for token, mask, advantage, logprob, place, heat, name in rows:
            assert (heat, name) == (heats[token], "math")
            if not fills:
                assert token not in seen
                seen[token] = mask, advantage, logprob, place
                trained += mask
    assert trained == sum(int(sequence.mask.sum()) for sequence in sequences)
    assert all(seen[token] == expected[token] for token in seen)
    assert all(not expected[token][0] for token in expected.keys() - seen.keys())


async def test_a_batch_is_acknowledged_when_the_weights_of_its_step_are_there(tmp_path: Path) -> None:
    """And they are published with their folder; the last batch ends the bridge."""
    acked: list[int] = []
    published: list[tuple[int, str | None]] = []
    async with make_server(
        bind=f"ipc://{tmp_path}/s",
        world_size=1,
        version=-1,
        on_ack=acked.append,
        on_publish=lambda version, path: published.append((version, path)),
    ) as server:
        out = tmp_path / "out"
        initial = broadcast(out, 0)
        async with bridge(server, out) as task:
            server.offer(make_batch(1))
            await until(lambda: (out / "rollouts" / "step_1" / "rank_1.bin").exists())
            assert (acked, published) == ([], [(0, str(initial))])
            assert len(read_batch(out, 1, 0)) == len(read_batch(out, 1, 1))
            first = broadcast(out, 1)
            await until(lambda: acked == [1])
            assert published[1:] == [(1, str(first))]
            server.offer(make_batch(2))
            server.offer(make_batch(3))
            server.finish("max_steps")
            await until(lambda: (out / "rollouts" / "step_3" / "rank_0.bin").exists())
            # Both have been trained on when it is looked at: the weights of the last one count.
            (out / "broadcasts" / "step_2").mkdir()
            third = broadcast(out, 3)
            await task
        assert acked == [1, 2, 3]
        assert published[2:] == [(3, str(third))]
    assert leftovers(tmp_path) == []


async def test_a_killed_bridge_writes_the_same_bytes_again(tmp_path: Path) -> None:
    """Killed between taking and acknowledging: nothing is lost, nothing is trained on twice."""
    acked: list[int] = []
    out = tmp_path / "out"
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, on_ack=acked.append) as server:
        server.offer(make_batch(1))
        async with bridge(server, out):
            await until(lambda: (out / "rollouts" / "step_1" / "rank_1.bin").exists())
        files = contents(out)
        assert (acked, len(files)) == ([], 2)
        async with bridge(server, out, ranks=2):
            server.offer(make_batch(2))
            await until(lambda: (out / "rollouts" / "step_2" / "rank_1.bin").exists())
            assert {path: path.read_bytes() for path in files} == files
        # The trainer is done with step 1 while no bridge is there.
        broadcast(out, 1)
        (out / "rollouts" / "step_1" / "rank_0.bin").unlink()
        async with bridge(server, out):
            await until(lambda: acked == [1])
            assert not (out / "rollouts" / "step_1" / "rank_0.bin").exists()


async def test_a_trainer_that_was_set_back_gets_the_steps_again_that_are_kept(tmp_path: Path) -> None:
    """Its broadcasts say where it stands. What is not kept any more ends the bridge with the reason."""
    out = tmp_path / "out"
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, keep=2) as server:
        for step in (1, 2, 3):
            server.restore(make_batch(step), [0])
        server.offer(make_batch(4))
        async with bridge(server, out):
            await until(lambda: [rank.rank for rank in server.ranks] == [0])
            assert not out.exists()
            broadcast(out, 2)
            await until(lambda: (out / "rollouts" / "step_4").exists())
            assert sorted(path.name for path in (out / "rollouts").iterdir()) == ["step_3", "step_4"]
        far = tmp_path / "far"
        broadcast(far, 0)
        async with bridge(server, far) as task:
            with pytest.raises(TrainerLinkError, match=r"step 1 is no longer kept .*keep_batches"):
                await task


async def test_a_trainer_may_go_back_while_the_bridge_goes_on(tmp_path: Path) -> None:
    """Its launcher deletes what is beyond its checkpoint: files that it will ask for are written again, kept batches too."""
    acked: list[int] = []
    out = tmp_path / "out"

    def clean_beyond(step: int) -> None:
        for folder in [*(out / "rollouts").iterdir(), *(out / "broadcasts").iterdir()]:
            if int(folder.name.removeprefix("step_")) > step:
                shutil.rmtree(folder)

    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, keep=4, on_ack=acked.append) as server:
        for step in range(1, 6):
            server.offer(make_batch(step))
        broadcast(out, 0)
        async with bridge(server, out):
            for step in (1, 2, 3):
                await until(lambda step=step: (out / "rollouts" / f"step_{step}").exists())  # type: ignore[misc]
                broadcast(out, step)
            await until(lambda: acked == [1, 2, 3] and (out / "rollouts" / "step_5" / "rank_1.bin").exists())
            files = contents(out)
            # It resumes from the step that it has done last: what it had been given is gone.
            clean_beyond(3)
            await until(lambda: contents(out) == files)
            clean_beyond(1)
            fed = {
                path: content for path, content in files.items() if path.parent.name in ("step_2", "step_3")
            }
            await until(lambda: fed.items() <= contents(out).items())
            for step in (2, 3, 4, 5):
                broadcast(out, step)
            await until(lambda: acked == [1, 2, 3, 4, 5])
            assert contents(out).items() <= files.items()


@pytest.mark.parametrize("set_back", [False, True])
async def test_weights_of_batches_that_were_never_given_acknowledge_nothing(
    tmp_path: Path, set_back: bool
) -> None:
    """They are what another run, or one that was set back since, has left in the directory."""
    out = tmp_path / "out"
    acked: list[int] = []
    if set_back:
        async with (
            make_server(bind=f"ipc://{tmp_path}/before", world_size=1, on_ack=acked.append) as server,
            bridge(server, out),
        ):
            for step in (1, 2, 3):
                server.offer(make_batch(step))
                await until(lambda step=step: (out / "rollouts" / f"step_{step}").exists())  # type: ignore[misc]
                broadcast(out, step)
                await until(lambda step=step: acked[-1:] == [step])  # type: ignore[misc]
    else:
        broadcast(out, 3)
    acked.clear()
    rewound = [1] if set_back else []
    async with make_server(
        bind=f"ipc://{tmp_path}/s", world_size=1, on_ack=acked.append, last_step=len(rewound), rewound=rewound
    ) as server:
        server.offer(make_batch(2 if set_back else 1))
        async with bridge(server, out) as task:
            await until(lambda: task.done() or acked)
            assert acked == []
            with pytest.raises(ConfigError, match=r"step_3 has weights of step 3.*another run.*--out"):
                await task
        for folder in [*out.glob("rollouts/step_*"), *out.glob("broadcasts/step_*")]:
            if int(folder.name.removeprefix("step_")) > len(rewound):
                shutil.rmtree(folder)
        async with bridge(server, out):
            await until(lambda: (out / "rollouts" / f"step_{len(rewound) + 1}" / "rank_1.bin").exists())
            broadcast(out, len(rewound) + 1)
            await until(lambda: acked == [len(rewound) + 1])


async def test_a_directory_that_cannot_be_used_for_a_while_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher deletes the folder that is just being written to, and a shared disk has its moments."""
    acked: list[int] = []
    out = tmp_path / "out"
    failures = {"share_out": 2, "newest_weights": 3}

    def failing(name: str) -> None:
        real = getattr(Exchange, name)

        def call(self: Exchange, *arguments: Any) -> Any:
            if not failures[name]:
                return real(self, *arguments)
            failures[name] -= 1
            if name == "share_out":
                shutil.rmtree(out / "rollouts")
                return real(self, *arguments)
            raise OSError(116, "Stale file handle")

        monkeypatch.setattr(Exchange, name, call)

    for name in failures:
        failing(name)
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, on_ack=acked.append) as server:
        server.offer(make_batch(1))
        async with bridge(server, out) as task:
            await until(lambda: task.done() or (out / "rollouts" / "step_1" / "rank_1.bin").exists())
            assert not task.done()
            assert set(failures.values()) == {0}
            broadcast(out, 1)
            await until(lambda: acked == [1])


async def test_a_trainer_that_goes_back_too_far_has_the_run_set_back_where_that_is_allowed(
    tmp_path: Path,
) -> None:
    """Whether the bridge goes on or is started for it; without being told so it asks for nothing."""
    asked: list[int] = []
    out = tmp_path / "out"
    exchange = Exchange(out, ranks=1, max_tokens=64)
    broadcast(out, 2)
    options: dict[str, Any] = {"find_obstacle": lambda step: "", "on_rewind": asked.append}
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, keep=1, **options) as server:
        for step in (1, 2, 3):
            server.restore(make_batch(step), [0])
        server.offer(make_batch(4))
        async with bridge(server, out) as task:
            await until(lambda: (out / "rollouts" / "step_4").exists())
            shutil.rmtree(out / "broadcasts" / "step_2")
            broadcast(out, 1)
            with pytest.raises(TrainerLinkError, match=r"trainer\.allow_rewind"):
                await task
        assert asked == []
        client = AsyncTrainerClient(server.address, auto_ack=False)
        task = asyncio.create_task(run_bridge(client, exchange, rewind=True, poll_s=POLL_S))
        try:
            await until(lambda: asked == [1])
        finally:
            task.cancel()
            await asyncio.wait([task])
