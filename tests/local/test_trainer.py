"""The reference trainer: what it learns, saves, publishes, and how it goes on after it was killed."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from orchestrator.groups.group import Batch, Group, plain_facts
from orchestrator.local.policy import Policy, load_policy
from orchestrator.local.tokenizer import END, apply_chat_template, encode
from orchestrator.local.trainer import Checkpoints, TrainerSpec, train
from orchestrator.tasks.task import TrainTask
from orchestrator.trainer import TrainerClient, TrainingBatch
from orchestrator.trainer.batch import decode_batch
from orchestrator.trainer_link.encoding import encode_batch
from tests.support.trainer_links import make_server


def make_batch(step: int) -> Batch:
    """Two answers to one question, of which the first was better."""
    prompt = apply_chat_template([{"role": "user", "content": f"say {'abcdefgh'[step % 8]}"}])
    answers = [[*encode("a"), END], [*encode("b"), END]]
    tokens = np.array([token for answer in answers for token in prompt + answer], np.int32)
    mask = np.array(([0] * len(prompt) + [1, 1]) * 2, np.uint8)
    group = Group(
        task=TrainTask("say", "train", step, 0, step),
        version=step - 1,
        version_end=step - 1,
        rollouts=2,
        lengths=(len(prompt) + 2,) * 2,
        tokens=tokens,
        mask=mask,
        logprobs=mask * np.float32(-3.0),
        rewards=np.array([1.0, 0.0], np.float32),
        advantages=np.array([1.0, -1.0], np.float32),
        facts=plain_facts(2, version=step - 1, version_end=step - 1),
        details=b"",
        digest=0,
    )
    return Batch(step=step, version=step - 1, groups=(group,))


@dataclass
class Served:
    """Stands in for the client: some batches, and what was published."""

    steps: Sequence[int]
    published: list[tuple[int, str]] = field(default_factory=list)
    reported: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    def __iter__(self) -> Iterator[TrainingBatch]:
        for step in self.steps:
            yield decode_batch([bytes(frame) for frame in encode_batch(make_batch(step), 0, 1)])

    def publish(self, version: int, path: str) -> str:
        assert load_policy(Path(path)) is not None, "weights are there before they are published"
        self.published.append((version, path))
        return ""

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        self.reported.append((step, metrics))


def run_trainer(checkpoints: Path, steps: Sequence[int], **options: float) -> Served:
    """Train on the batches of some steps, as one process would."""
    served = Served(steps)
    spec = TrainerSpec(address="", checkpoints=str(checkpoints), **options)  # type: ignore[arg-type]
    train(spec, cast("TrainerClient", served))
    return served


def table_after(checkpoints: Path, step: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    return load_policy(checkpoints / f"step_{step}").table


def test_every_step_is_saved_and_published_as_its_version(tmp_path: Path) -> None:
    """After step N version N is published, with the folder of its weights; only the last few are kept."""
    served = run_trainer(tmp_path, range(1, 8))
    assert served.published == [(step, str(tmp_path / f"step_{step}")) for step in range(1, 8)]
    assert [step for step, _ in served.reported] == list(range(1, 8))
    assert served.reported[0][1].keys() == {"ratio", "clipped", "entropy"}
    assert Checkpoints(tmp_path, 4).steps() == [4, 5, 6, 7]
    assert not np.array_equal(table_after(tmp_path, 6), table_after(tmp_path, 7))


def test_without_a_learning_rate_versions_are_published_that_change_nothing(tmp_path: Path) -> None:
    """With a learning rate of 0 the loop runs, and the weights stay those of a new policy."""
    served = run_trainer(tmp_path, [1, 2], learning_rate=0.0)
    assert [version for version, _ in served.published] == [1, 2]
    np.testing.assert_array_equal(table_after(tmp_path, 2), Policy().table)


def test_a_restarted_trainer_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Trained in two lives, the weights are those of one; a batch that is served again is not learned twice."""
    run_trainer(tmp_path / "one", range(1, 7))
    run_trainer(tmp_path / "two", range(1, 4))
    # Killed after step 3 was saved and before it was acknowledged: it is served again.
    served = run_trainer(tmp_path / "two", range(3, 7))
    assert [version for version, _ in served.published] == [3, 4, 5, 6]
    np.testing.assert_array_equal(table_after(tmp_path / "one", 6), table_after(tmp_path / "two", 6))


def test_a_run_begun_anew_starts_from_a_new_policy(tmp_path: Path) -> None:
    """Weights of an earlier run in the same directory do not leak into the first step of a new one."""
    run_trainer(tmp_path / "used", range(1, 7))
    run_trainer(tmp_path / "used", [1])
    run_trainer(tmp_path / "fresh", [1])
    np.testing.assert_array_equal(table_after(tmp_path / "used", 1), table_after(tmp_path / "fresh", 1))
    assert Checkpoints(tmp_path / "used", 4).steps() == [1]


def test_a_folder_without_complete_weights_does_not_count(tmp_path: Path) -> None:
    """A crash between making the folder and naming the file leaves the step before as the newest."""
    run_trainer(tmp_path, [1, 2])
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / ".policy.npz.77").write_bytes(b"half")
    (tmp_path / "step_x").mkdir()
    assert Checkpoints(tmp_path, 4).steps() == [1, 2]
    assert Checkpoints(tmp_path, 4).load_before(4)[1] == 2


async def test_the_trainer_process_learns_from_a_real_service_and_ends_with_it(tmp_path: Path) -> None:
    """As a child process it takes batches off the wire, publishes each version, and exits 0 when there are no more."""
    published: list[int] = []
    acked: list[int] = []
    server = make_server(
        bind="tcp://127.0.0.1:0",
        world_size=1,
        on_publish=lambda version, path: published.append(version),
        on_ack=acked.append,
    )
    async with server:
        for step in (1, 2, 3):
            server.offer(make_batch(step))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "orchestrator.local.trainer", stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            spec = {"address": server.address, "checkpoints": str(tmp_path)}
            process.stdin.write(json.dumps(spec).encode() + b"\n")
            events = [json.loads(await process.stderr.readline()) for _ in range(3)]
            server.finish("all steps are done")
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            process.stdin.close()
    assert code == 0
    assert published == acked == [1, 2, 3]
    assert [(event["event"], event["step"], event["reward"]) for event in events] == [
        ("trainer.step_done", step, 0.5) for step in (1, 2, 3)
    ]
    assert table_after(tmp_path, 3).any()


async def test_the_trainer_process_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """The end of standard input ends it, also while it waits for a service that never answers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orchestrator.local.trainer", stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    spec = {"address": "tcp://127.0.0.1:1", "checkpoints": str(tmp_path)}
    process.stdin.write(json.dumps(spec).encode() + b"\n")
    await process.stdin.drain()
    process.stdin.close()
    assert await process.wait() != 0
