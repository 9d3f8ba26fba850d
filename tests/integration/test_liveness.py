"""Runs that once did not end: each is a small one with real processes, and must end with every batch as it was asked for.

`liveness_search` looks for more of them.
"""

import asyncio
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load_config
from orchestrator.errors import ConfigError, TrainerLinkError
from orchestrator.trainer import AsyncTrainerClient, TrainingBatch
from tests.integration.liveness import Chaos, Experiment, LivenessError, configuration, drawn
from tests.integration.service_fixture import Command, write_config

pytestmark = pytest.mark.timeout(600)

BOUND_S = 400.0
"""Of runs that take seconds: only one that hangs needs as long on any machine."""

SEVERAL = {"sequences": [17, 20]}
KNOWN: dict[str, dict[str, Any]] = {
    "more in flight than one server has room for": configuration(
        [drawn("a"), drawn("b", args={"latency_s": [0.0, 0.02]})],
        batch={"size": 64},
        dispatch={"max_inflight": 512, "ramp_s": 0.0},
        staleness={"max_versions": 16},
    ),
    "little room on a server": configuration(
        [drawn("a", capacity=16, args={"latency_s": [0.0, 0.02]}), drawn("b")], batch={"size": 32}
    ),
    "groups of 17 to 20 sequences": configuration(
        [drawn("a", group_size=1, args=SEVERAL), drawn("b", group_size=1, args=SEVERAL)], batch={"size": 64}
    ),
    "minimums that whole groups do not fit": configuration(
        [
            drawn("a", group_size=4),
            drawn("b", group_size=3, min_batch_allocation=0.4),
            drawn("c", group_size=4, min_batch_allocation=0.1),
        ],
        batch={"size": 16, "stuck_after_s": 0.5},
    ),
    "the same, never split": configuration(
        [
            drawn("a", group_size=4),
            drawn("b", group_size=3, min_batch_allocation=0.4),
            drawn("c", group_size=4, min_batch_allocation=0.1),
        ],
        batch={"size": 16, "on_stuck": "wait"},
    ),
    "a minimum of an env with a low rate": configuration(
        [drawn("a"), drawn("b", min_batch_allocation=0.25, rollouts_per_minute=60)], max_steps=4
    ),
    "a disk that is always behind": configuration(
        [drawn("a"), drawn("b", args={"sequences": [1, 3]})], journal={"max_backlog_bytes": 1}
    ),
    "an env that is never picked beside a capped one": configuration(
        [drawn("a", ratio=0), drawn("b", ratio=1.0, max_inflight=2, args={"latency_s": [0.0, 0.02]})]
    ),
    "one rollout at a time": configuration(
        [drawn("a", grouped=True), drawn("b")], dispatch={"max_inflight": 1, "ramp_s": 0.0}
    ),
    "quotas that are waited for, after splits": configuration(
        [
            drawn("a", group_size=8, args={"sequences": [2, 3]}),
            drawn("b", group_size=8, grouped=True, args={"sequences": [2, 3], "busy": 0.1}),
            drawn("c", group_size=5, max_inflight=2, args={"sequences": [2, 3], "broken": 0.05}),
        ],
        batch={"size": 24, "quotas": True, "on_starved": "wait", "stuck_after_s": 0.2, "max_buffered": 3},
        dispatch={"max_inflight": 32, "min_valid": 2, "keep_equal_rewards": True, "backoff_s": 0.01},
        staleness={"max_versions": 4, "mode": "drop"},
    ),
    "evaluations at every step on little room": configuration(
        [drawn("a"), drawn("b", capacity=3)],
        eval={
            "interval": 1,
            "num_examples": 7,
            "env": [drawn("examination", capacity=1, args={"tasks": 20, "broken": 0.1})],
        },
        staleness={"max_versions": 0},
    ),
}


@pytest.mark.parametrize("name", KNOWN)
async def test_a_run_ends_with_every_batch_as_it_was_asked_for(tmp_path: Path, name: str) -> None:
    """Within its time, with exit code 0, nothing twice, nothing too old, every minimum kept or its absence announced."""
    values = KNOWN[name]
    if all("ratio" not in env for env in values["train"]["env"]):
        for env in values["train"]["env"]:
            env["ratio"] = 1.0
    await Experiment(tmp_path, values, bound_s=BOUND_S).run()


async def test_a_killed_worker_of_two_is_replaced(tmp_path: Path) -> None:
    """What it had in flight is asked again; the other one goes on."""
    env = drawn("a", ratio=1.0, workers=2, args={"latency_s": [0.0, 0.05]})
    values = configuration([env], max_steps=30)
    experiment = Experiment(tmp_path, values, bound_s=BOUND_S)
    await experiment.run(Chaos(random.Random(1), servers=1, within_s=0.1))
    assert experiment.events("env.server_lost")


async def test_a_run_that_is_killed_again_and_again_ends(tmp_path: Path) -> None:
    """SIGKILL of the orchestrator under load: the same command goes on where it was."""
    values = configuration([drawn("a", ratio=1.0, args={"latency_s": [0.0, 0.05]})], max_steps=60)
    await Experiment(tmp_path, values, bound_s=BOUND_S).run(
        Chaos(random.Random(2), orchestrator=3, within_s=0.5)
    )


@pytest.mark.slow
@pytest.mark.parametrize("on_starved", ["redistribute", "wait"])
async def test_quotas_hold_in_a_run_that_is_killed_again_and_again(tmp_path: Path, on_starved: str) -> None:
    """The orchestrator and its env servers are killed; what quotas carry over goes on with the run."""
    envs = [
        drawn("a", ratio=1.0, group_size=4, args={"latency_s": [0.0, 0.05], "sequences": [1, 2]}),
        drawn("b", ratio=0.5, group_size=3, args={"latency_s": [0.0, 0.1]}, max_restarts=50),
    ]
    values = configuration(envs, max_steps=40, batch={"size": 24, "quotas": True, "on_starved": on_starved})
    await Experiment(tmp_path, values, bound_s=BOUND_S).run(
        Chaos(random.Random(3), orchestrator=3, servers=2, within_s=1.0)
    )


@pytest.mark.slow
async def test_a_run_that_is_killed_while_it_drains_goes_on(tmp_path: Path) -> None:
    """It was asked to stop, waits for what is in flight, and is killed: nothing is lost or trained on twice."""
    values = configuration(
        [drawn("a", ratio=1.0, args={"latency_s": [0.0, 1.0]})], max_steps=30, batch={"size": 8}
    )
    experiment = Experiment(tmp_path, values, bound_s=BOUND_S)
    await experiment.run(Chaos(random.Random(4), orchestrator=3, within_s=0.5, while_draining=True))
    assert experiment.events("run.draining")


@pytest.mark.slow
async def test_a_leaking_environment_does_not_outlive_its_run(tmp_path: Path) -> None:
    """Tasks, files, memory and processes that rollouts leave behind are gone with their server."""
    env = {**drawn("a", ratio=1.0), "id": "tests.integration.liveness_envs:Leaking"}
    await Experiment(tmp_path, configuration([env], max_steps=20), bound_s=BOUND_S).run()


@pytest.mark.slow
async def test_a_server_that_blocks_for_less_than_the_silence_limit_is_not_given_up(tmp_path: Path) -> None:
    """Each rollout holds its event loop for a while: it may be called frozen, but nothing is lost."""
    env = drawn("a", ratio=1.0, group_size=2, args={"seconds": 1.0}, capacity=1, silence_timeout_s=20.0)
    env["id"] = "tests.integration.liveness_envs:Blocking"
    experiment = Experiment(tmp_path, configuration([env], max_steps=3, batch={"size": 4}), bound_s=BOUND_S)
    await experiment.run()
    assert not experiment.events("env.server_lost")


class Mistaken(Experiment):
    """A trainer whose first versions have no weights, as one that was copied from the README."""

    refusals: list[str]

    async def on_batch(self, trainer: AsyncTrainerClient, batch: TrainingBatch, weights: str) -> None:
        try:
            await trainer.publish(batch.step, str(self.directory / "ckpt" / f"step_{batch.step}"))
        except TrainerLinkError as error:
            self.refusals.append(str(error))


class Vanishing(Experiment):
    """A trainer that removes what it has just published, every time."""

    async def on_batch(self, trainer: AsyncTrainerClient, batch: TrainingBatch, weights: str) -> None:
        mine = self.directory / "ckpt" / f"step_{batch.step}"
        await asyncio.to_thread(shutil.copytree, weights, mine)
        await trainer.publish(batch.step, str(mine))
        await asyncio.to_thread(shutil.rmtree, mine)


async def test_a_version_without_weights_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    """`publish` raises with the path; the policy stays the one that was loaded."""
    values = configuration([drawn("a", ratio=1.0)], staleness={"max_versions": 100})
    experiment = Mistaken(tmp_path, values, bound_s=BOUND_S)
    experiment.refusals = []
    await experiment.run()
    assert len(experiment.refusals) == 6
    assert "step_1" in experiment.refusals[0]


async def test_a_run_whose_checkpoint_is_gone_says_so_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    """The policy server of the next life finds no weights: the run starts, says what is missing, and looks again."""
    values = configuration([drawn("a", ratio=1.0)], max_steps=30, local={"trainer": True})
    experiment = Experiment(tmp_path, values, bound_s=BOUND_S)
    async with await Command.start("run", experiment.config, logs=tmp_path / "logs") as command:
        await command.wait_event("weights.updated", 3)
        command.send(signal.SIGKILL)
        await command.wait()
    there, aside = experiment.run_dir / "checkpoints", tmp_path / "aside"
    await asyncio.to_thread(there.rename, aside)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(experiment.run())
        while not experiment.events("weights.missing"):
            assert not running.done()
            await asyncio.sleep(0.05)
        await asyncio.to_thread(shutil.copytree, aside, there, dirs_exist_ok=True)
    assert str(there) in experiment.events("weights.missing")[0]["error"]


@pytest.mark.slow
async def test_a_run_whose_checkpoint_is_gone_ends_where_no_other_can_come(tmp_path: Path) -> None:
    """The reference trainer has trained on every batch, and without weights there is no further one: exit code 8, with what to do."""
    values = configuration([drawn("a", ratio=1.0)], max_steps=4, local={"trainer": True})
    experiment = Experiment(tmp_path, values, bound_s=BOUND_S)
    await experiment.run()
    await asyncio.to_thread(shutil.rmtree, experiment.run_dir / "checkpoints")
    arguments = ("--max_steps", "8")
    async with await Command.start("run", experiment.config, *arguments, logs=tmp_path / "logs") as command:
        assert await command.wait() == 8
    assert "step_4" in command.errors()
    assert "--rewind-to STEP" in command.errors()


async def test_a_version_that_a_returning_server_cannot_load_does_not_keep_the_run_from_ending(
    tmp_path: Path,
) -> None:
    """The weights vanish between publication and loading, while no inference server is in service."""
    values = configuration([drawn("a", ratio=1.0)], staleness={"max_versions": 100})
    experiment = Vanishing(tmp_path, values, bound_s=BOUND_S)
    await experiment.run()
    assert experiment.events("weights.refused")


@pytest.mark.parametrize("mode", ["drop", "pace"])
async def test_a_queue_that_never_makes_an_exact_batch_ends_the_run_instead_of_growing(
    tmp_path: Path, mode: str
) -> None:
    """The rollouts' several sequences are known to nobody before: exit code 7, with the sizes and the remedy."""
    values = configuration(
        [
            drawn("a", group_size=17, ratio=0.2, min_batch_allocation=0.1),
            drawn("b", group_size=7, ratio=0.5, args={"sequences": [2, 3], "latency_s": [0.0, 0.1]}),
        ],
        batch={"size": 24, "on_stuck": "wait"},
        dispatch={"max_barren_batches": 4, "keep_equal_rewards": True},
        staleness={"mode": mode},
    )
    experiment = Experiment(tmp_path, values, bound_s=BOUND_S)
    with pytest.raises(LivenessError, match="exit code 7"):
        await experiment.run()
    said = experiment.commands[0].errors()
    assert "cannot make exactly 24" in said
    assert 'set batch.on_stuck = "split"' in said


async def test_ranks_that_cannot_share_a_batch_are_refused(tmp_path: Path) -> None:
    """Before anything is started, with both numbers."""
    values = configuration([drawn("a", ratio=1.0)], trainer={"world_size": 3}, run_dir=str(tmp_path / "run"))
    path = write_config(tmp_path / "config.toml", values)
    with pytest.raises(ConfigError, match="a batch of 16 cannot be shared equally by 3 ranks"):
        load_config(path)
    assert not (tmp_path / "run").exists()
