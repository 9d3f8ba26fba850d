"""Ranks that speak of steps that they cannot have had: what they have was given up, or belongs to another run. No I/O.

A rank can have had the steps that were there before this process, and those that it was served with since. When a run is set back, later
steps are formed anew under the same numbers; a trainer that stands on the old ones must not publish, acknowledge or ask as if it had the new
ones. Its own client notices a rewind when it joins again (`ranks`); this holds for every other one, and for checkpoints of what was given up.
"""

from collections.abc import Sequence

from orchestrator.trainer.protocol import (
    Ack,
    Checkpointed,
    Missing,
    Next,
    Publish,
    Report,
    ToServer,
    Updated,
    Updating,
)
from orchestrator.trainer_link.held import HeldBatches


def explain_unserved(
    held: HeldBatches, rewound: Sequence[int], rank: int, message: ToServer
) -> Missing | None:
    """The answer to a rank that goes by a step that it cannot have had; None where it can, or where that is not known."""
    match message:
        case Next(after=step):
            what = f"goes on behind step {step}"
        case Ack(step=step):
            what = f"acknowledges step {step}"
        case Report(step=step):
            what = f"reports numbers of step {step}"
        case Checkpointed(step=step):
            what = f"has saved a checkpoint of step {step}"
        case Publish(version=version) | Updating(version=version) | Updated(version=version):
            # Of a rank that has had nothing since the run was set back, a version that has the number of a step is of that step.
            unknown = not message.step and rewound and not held.was_served(rank)
            step = version if unknown else message.step
            what = f"has version {version} of step {step}"
        case _:
            return None
    had = held.had_by(rank)
    if not had < step <= held.last_step:
        return None
    back = f" since the run was set back to step {rewound[-1]}" if rewound else ""
    return Missing(
        message.id,
        f"rank {rank} {what}, which it was never served{back}; does the trainer's checkpoint belong to another run, or to what was given "
        f"up? Restart it from a checkpoint of step {had} or before",
    )
