"""The messages that stand in `protocol_1`: files that were written when the protocol had that number.

They are never written again. `messages` and `recorded_batch` say what each must still be read as.
"""

from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.groups.group import Batch, Group, plain_facts
from orchestrator.tasks.task import TrainTask
from orchestrator.trainer.filesystem import read_message
from orchestrator.trainer.protocol import (
    Ack,
    Done,
    Finished,
    Get,
    Join,
    Leave,
    Missing,
    Next,
    Ok,
    Ping,
    Pong,
    Publish,
    Refused,
    ToServer,
    ToTrainer,
    Unknown,
    Welcome,
)

HERE = Path(__file__).parent


def messages(protocol: int) -> dict[str, ToServer | ToTrainer]:
    """What the recorded messages of a protocol mean, by the name of their file."""
    return {
        "join": Join(protocol, 1, 2, "0123456789abcdef", "node7", 4321),
        "next": Next(1, after=2),
        "get": Get(2, 3),
        "ack": Ack(3, 3),
        "publish": Publish(4, 3, "ckpt/step_3", step=3),
        "publish_without_path": Publish(5, 4),
        "done": Done(6),
        "ping": Ping(),
        "leave": Leave(),
        "welcome": Welcome(protocol, run="r", world_size=2, after=2, version=2),
        "refused": Refused("no"),
        "unknown": Unknown(),
        "missing": Missing(2, "gone"),
        "finished": Finished(1, "max_steps reached"),
        "ok": Ok(3, "step 3 was acknowledged before"),
        "pong": Pong(),
    }


def recorded_batch() -> Batch:
    """The batch whose frames for two ranks were recorded; its numbers come from no random generator."""
    groups = []
    for position, lengths in enumerate([(3, 5, 2, 4), (6, 1, 2, 7)]):
        total = sum(lengths)
        numbers = np.arange(total)
        groups.append(
            Group(
                task=TrainTask("math", "train", index=position, epoch=0, position=position),
                version=position + 1,
                version_end=position + 2,
                rollouts=len(lengths),
                lengths=lengths,
                tokens=(numbers * 7919 % 150_000).astype(np.int32),
                mask=(numbers % 3 > 0).astype(np.uint8),
                logprobs=(-numbers / 64).astype(np.float32),
                rewards=np.array([0.0, 0.25, 0.5, 1.0], np.float32),
                advantages=np.array([-1.5, -0.5, 0.5, 1.5], np.float32),
                facts=plain_facts(len(lengths), version=position + 1, version_end=position + 2),
                details=b"",
                digest=0,
                transcript=b"",
            )
        )
    return Batch(3, 2, tuple(groups))


def read_recorded(name: str) -> list[Any]:
    """The frames of a recorded message."""
    return list(read_message(HERE / "protocol_1" / f"{name}.msg"))
