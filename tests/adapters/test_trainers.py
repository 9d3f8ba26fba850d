"""What trainers of other libraries make of our batches, with the real libraries."""

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.bridges.atropos_server import run_bridge
from orchestrator.trainer import AsyncTrainerClient
from orchestrator.trainer.batch import decode_batch
from orchestrator.trainer_link.encoding import encode_batch
from tests.adapters.venvs import CHECKOUT, TRAINERS
from tests.support.journal_groups import make_batch
from tests.support.ports import free_port
from tests.support.trainer_links import make_server

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(600)]


@pytest.fixture
def python() -> Path:
    """The interpreter that has torch and the example trainer of Atropos."""
    if reason := TRAINERS.missing():
        pytest.skip(reason)
    return TRAINERS.python


async def run_script(python: Path, script: str, *arguments: str) -> dict[str, Any]:
    """The last line that a script of this folder prints, which is JSON."""
    process = await asyncio.create_subprocess_exec(
        python,
        CHECKOUT / "tests" / "adapters" / script,
        *arguments,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-3000:]
    found: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return found


async def test_a_torch_data_loader_reads_every_batch(python: Path, tmp_path: Path) -> None:
    """Tensors go through torch's own functions; steps are acknowledged in order; workers, which ask ahead, are refused."""
    acked: list[int] = []
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, on_ack=acked.append) as server:
        for step in (1, 2, 3):
            server.offer(make_batch(step))
        server.finish("max_steps")
        told = await run_script(python, "torch_trainer.py", server.address)
    assert acked == [1, 2, 3]
    assert told["finished"] == "max_steps"
    assert told["workers_refused"]
    for step in (1, 2, 3):
        batch = decode_batch([bytearray(frame) for frame in encode_batch(make_batch(step), 0, 1)])
        sampled = sum(int(sequence.mask[1:].sum()) for sequence in batch.sequences)
        padded = [item for item in told["seen"] if item[0] == step and len(item[1]) == 2]
        packed = [item for item in told["seen"] if item[0] == step and len(item[1]) == 1]
        assert sum(item[2] for item in padded) == sampled
        assert [item[2:] for item in packed] == [[sampled, sampled]]
        assert packed[0][1][0] == -(-len(batch.tokens) // 8) * 8


async def test_the_example_trainer_of_atropos_reads_every_batch_through_the_bridge(
    python: Path, tmp_path: Path
) -> None:
    """Its own functions register, ask and lay out; what they train on is what was sampled, and each batch comes once."""
    acked: list[int] = []
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, on_ack=acked.append) as server:
        for step in (1, 2, 3):
            server.offer(make_batch(step))
        server.finish("max_steps")
        port = free_port()
        bridge = run_bridge(
            AsyncTrainerClient(server.address, auto_ack=False),
            host="127.0.0.1",
            port=port,
            note=tmp_path / "note.json",
        )
        async with asyncio.TaskGroup() as tasks:
            bridging = tasks.create_task(bridge)
            told = await run_script(python, "atropos_trainer.py", f"http://127.0.0.1:{port}", "3")
            await bridging
    assert acked == [1, 2, 3]
    for step, seen in enumerate(told["seen"], start=1):
        batch = decode_batch([bytearray(frame) for frame in encode_batch(make_batch(step), 0, 1)])
        assert (seen["at_once"], seen["advantages"]) == (1, len(batch))
        expected = sorted(
            (
                int(sequence.tokens[0]),
                int(sequence.mask[1:].sum()),
                float(sequence.logprobs[1:][sequence.mask[1:] != 0].sum()),
            )
            for sequence in batch.sequences
        )
        for row, wanted in zip(sorted(map(tuple, seen["rows"])), expected, strict=True):
            assert row == pytest.approx(wanted, abs=1e-4)
        heats = sorted(sequence.temperature or 1.0 for sequence in batch.sequences)
        assert sorted(seen["temperatures"]) == pytest.approx(heats)


async def test_the_loss_of_the_torch_example_is_truncated_importance_sampling(python: Path) -> None:
    """As a loop over tokens gives it, with the gradient that a ratio which is no part of it has."""
    rng = np.random.default_rng(0)
    shape = (3, 7)
    ours, recorded = -3 * rng.random(shape), -3 * rng.random(shape)
    mask = rng.integers(0, 2, shape).astype(bool)
    advantages = rng.normal(size=shape) * mask
    given = {
        "ours": ours.tolist(),
        "logprobs": (recorded * mask).tolist(),
        "advantages": advantages.tolist(),
        "mask": mask.tolist(),
        "highest_ratio": 1.5,
    }
    told = await run_script(python, "grpo_torch_trainer.py", json.dumps(given))
    loss, truncated, gradient = 0.0, 0, np.zeros(shape)
    for at in zip(*np.nonzero(mask), strict=True):
        ratio = math.exp(ours[at] - recorded[at])
        truncated += ratio > 1.5
        gradient[at] = -min(ratio, 1.5) * advantages[at]
        loss += gradient[at] * ours[at]
    assert truncated > 0
    assert told["truncated"] == truncated
    assert told["loss"] == pytest.approx(loss, rel=1e-4)
    np.testing.assert_allclose(told["gradient"], gradient, rtol=1e-4)


async def test_the_torch_example_goes_on_from_an_earlier_checkpoint_and_writes_to_no_folder_twice(
    python: Path, tmp_path: Path
) -> None:
    """With a step it is that one, and later ones count no more; without, the last. The last checkpoints stay, and other folders go with time."""
    for name in ("step_1", "step_2", "step_4", "step_5", "step_6", "step_6_1", "step_7.unfinished"):
        (tmp_path / name).mkdir()
    for name in ("step_2", "step_4", "step_6"):
        (tmp_path / name / "optimizer.pt").touch()

    async def ask(**options: Any) -> Any:
        given = {"output": str(tmp_path), "resume_from": None, "keep": 3, "keep_checkpoints": 2, **options}
        return await run_script(python, "grpo_torch_trainer.py", json.dumps(given))

    refused = await ask(step=1, resume_from=3)
    assert "has checkpoints of [2, 4, 6], not 3" in refused["refused"]
    last = await ask(step=6)
    assert (last["step"], last["folder"], last["unused"]) == (6, "step_6", "step_6_2")
    assert last["left"] == ["step_4", "step_5", "step_6", "step_6_1", "step_7.unfinished"]
    back = await ask(step=5, resume_from=4)
    assert (back["step"], back["folder"], back["unused"]) == (4, "step_4", "step_5_1")
    assert (tmp_path / "step_6" / "optimizer.pt.given_up").exists()
    assert (await ask(step=5))["step"] == 4
