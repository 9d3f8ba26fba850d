"""The batch job in deploy/slurm, really run: what SLURM does for it is done by two scripts of the test.

`scontrol` names three nodes, which are addresses of the loopback device; `srun` starts the tasks of a step here. The
orchestrator, the env servers with their keys, an engine and a trainer of two ranks are real.
"""

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from tests.integration.env_servers import ROOT, until
from tests.support.ports import free_port, free_ports

SCRIPT = ROOT / "deploy" / "slurm" / "run.sbatch"
SCONTROL = "#!/bin/sh\nprintf '%s\\n' $NODES\n"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    case $1 in
        --ntasks=*) tasks=${1#*=} ;;
        --output=*) output=${1#*=} ;;
        --nodelist=*) node=${1#*=} ;;
    esac
    shift
done
pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
for ((rank = 0; rank < tasks; rank++)); do
    SLURM_PROCID=$rank SLURMD_NODENAME=$node "$@" >>"$output" 2>&1 &
    pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do
    code=0; wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do code=0; wait "$pid" || code=$?; done
    ((code > worst)) && worst=$code
done
exit $worst
"""
ENGINE = """
import asyncio, os, sys
from orchestrator.local.server import PolicyServerSpec, serve

if os.environ.get("DIES_ONCE") and not os.path.exists(os.environ["DIES_ONCE"]):
    open(os.environ["DIES_ONCE"], "w").close()
    sys.exit("no GPU is free")

async def main():
    async with serve(PolicyServerSpec(host=os.environ["SLURMD_NODENAME"], port=int(sys.argv[1]))):
        await asyncio.Event().wait()

asyncio.run(main())
"""
TRAINER = """
import os, sys
from orchestrator.trainer import TrainerClient

rank = int(os.environ["SLURM_PROCID"])
address, world_size = os.environ["ORCHESTRATOR_ADDRESS"], int(os.environ["WORLD_SIZE"])
with TrainerClient(address, rank=rank, world_size=world_size) as trainer:
    for batch in trainer:
        if rank == 0:
            trainer.publish(batch.step)
        with open(f"{sys.argv[1]}-{rank}", "a") as file:
            file.write(f"{batch.step}\\n")
"""
OVERRIDES = {
    "model.name": "local",
    "inference.weight_update": "none",
    "batch.size": "16",
    "train.group_size": "4",
    "http.enabled": "false",
}


class Cluster:
    """A directory with the two commands, and what the trainer's ranks have written down."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self._environ = {
            **os.environ,
            "PATH": f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-3]",
            "NODES": "127.0.0.1 127.0.0.2 127.0.0.3",
            "RUN": str(self.run_dir),
            "RANKS_PER_NODE": "2",
            "ENGINE": f"{sys.executable} {directory}/engine.py ENGINE_PORT",
            "TRAINER": f"{sys.executable} {directory}/trainer.py {directory}/rank",
            "ENVS": "reverse=builtin::reverse lookup=builtin::lookup",
        }
        for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
            (directory / name).write_text(text)
            (directory / name).chmod(stat.S_IRWXU)
        (directory / "engine.py").write_text(ENGINE)
        (directory / "trainer.py").write_text(TRAINER)

    async def submit(self, *arguments: str, **environ: str) -> asyncio.subprocess.Process:
        """Start the job, as `sbatch` would have it started on its first node."""
        # Both env servers have a port, one behind the other.
        ports = {"ENGINE_PORT": free_port(), "ENV_PORT": free_ports(2), "TRAINER_PORT": free_port()}
        numbers = {name: str(port) for name, port in ports.items()}
        overrides = [word for key, value in OVERRIDES.items() for word in (f"--{key}", value)]
        return await asyncio.create_subprocess_exec(
            "bash",
            SCRIPT,
            *overrides,
            *arguments,
            env={**self._environ, **numbers, **environ},
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    def steps(self, rank: int) -> list[int]:
        """The steps that a rank has trained on, over all jobs."""
        path = self.directory / f"rank-{rank}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def logs(self) -> str:
        """The last words of every step."""
        return "\n".join(
            f"{path.name}: {path.read_text()[-1500:]}" for path in (self.run_dir / "steps").glob("*.log")
        )


def kill(*jobs: asyncio.subprocess.Process) -> None:
    """End what is left of them."""
    for job in jobs:
        if job.returncode is None:
            os.killpg(job.pid, signal.SIGKILL)


async def ended(job: asyncio.subprocess.Process) -> tuple[int, str]:
    """The job's exit code and what it said."""
    assert job.stderr is not None
    said = (await job.stderr.read()).decode()
    return await job.wait(), said


@pytest.mark.timeout(600)
async def test_a_job_that_runs_out_of_time_drains_and_the_next_goes_on_with_its_run(tmp_path: Path) -> None:
    """SIGTERM to the script ends all of it in good order; the same directory again goes on behind the last step."""
    cluster = Cluster(tmp_path)
    jobs = [first := await cluster.submit("--max_steps", "1000")]
    try:
        await until(lambda: len(cluster.steps(1)) >= 3 or first.returncode is not None)
        first.send_signal(signal.SIGTERM)
        code, said = await ended(first)
        assert code == 128 + signal.SIGTERM, said + cluster.logs()
        done = max(cluster.steps(0))
        # With the run's own file, as somebody may name it who has changed it there.
        own = str(cluster.run_dir / "config.toml")
        jobs.append(second := await cluster.submit("--max_steps", str(done + 4), CONFIG=own))
        code, said = await ended(second)
        assert code == 0, said + cluster.logs()
    finally:
        kill(*jobs)
    assert sorted(set(cluster.steps(0))) == sorted(set(cluster.steps(1))) == list(range(1, done + 5))
    assert (cluster.run_dir / "engines.txt").read_text().startswith("http://127.0.0.3:")
    assert (cluster.run_dir / "keys" / "server.secret").stat().st_mode & 0o077 == 0


@pytest.mark.timeout(600)
async def test_env_servers_have_a_node_of_their_own_and_an_engine_that_died_is_started_again(
    tmp_path: Path,
) -> None:
    """The files name them where they are, and the job says what it has started again."""
    cluster = Cluster(tmp_path)
    job = await cluster.submit(
        "--max_steps",
        "2",
        NODES="127.0.0.1 127.0.0.2 127.0.0.3 127.0.0.4",
        ENV_NODES="1",
        DIES_ONCE=str(tmp_path / "died"),
        RESTART_PAUSE_S="0",
    )
    try:
        code, said = await ended(job)
    finally:
        kill(job)
    assert code == 0, said + cluster.logs()
    assert "engine-127.0.0.4 ended; it is started again in 0 s (4 more times)" in said
    assert (cluster.run_dir / "env-lookup.txt").read_text().startswith("tcp://127.0.0.2:")
    assert (cluster.run_dir / "engines.txt").read_text().startswith("http://127.0.0.4:")
    assert "no GPU is free" in (cluster.run_dir / "steps" / "engine-127.0.0.4.log").read_text()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TRAINER_NODES": "0"}, 'TRAINER_NODES is "0"; the trainer needs 1 node or more'),
        ({"TRAINER_NODES": "two"}, 'TRAINER_NODES is "two"; the trainer needs 1 node or more'),
        ({"RANKS_PER_NODE": "0"}, 'RANKS_PER_NODE is "0"; a node of the trainer has 1 rank or more'),
        ({"ENV_NODES": "-1"}, 'ENV_NODES is "-1"; write a number, 0 for the orchestrator\'s own node'),
        (
            {"ENV_NODES": "1"},
            "no node is left for an engine: 3 nodes, of which the orchestrator has one, env servers 1",
        ),
    ],
)
async def test_a_job_that_cannot_be_laid_out_says_so(
    tmp_path: Path, environ: dict[str, str], words: str
) -> None:
    """In one line, before anything is started."""
    cluster = Cluster(tmp_path)
    code, said = await ended(await cluster.submit(**environ))
    assert code == 2
    [line] = said.splitlines()
    assert words in line
    assert not cluster.run_dir.exists()


async def test_a_job_without_a_node_for_an_engine_says_so(tmp_path: Path) -> None:
    """Before anything is started."""
    cluster = Cluster(tmp_path)
    code, said = await ended(await cluster.submit(NODES="127.0.0.1 127.0.0.2"))
    assert code == 2
    assert "no node is left for an engine" in said
    assert not cluster.run_dir.exists()
