"""Every snippet of the pages works as printed, in a directory that holds nothing else.

Files are written under the names that they give themselves, a piece of a configuration is completed to one that could be
run, and commands are run by a shell. What is replaced is what a reader replaces too: CONFIG, RUN_DIR, paths of
virtualenvs; and the port of the trainer link, because tests run side by side.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from envs.loader import LOADERS
from orchestrator.trainer import TrainerClient
from tests.integration.service_fixture import write_config
from tests.support.journal_groups import make_batch
from tests.support.ports import free_port
from tests.support.snippets import COMMAND, blocks, run_all, sh_blocks
from tests.support.trainer_links import make_server

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

SMALL: dict[str, Any] = {
    "run_dir": "runs/small",
    "max_steps": 3,
    "local": {},
    "batch": {"size": 16},
    "train": {
        "sampling": {"max_tokens": 4},
        "env": [
            {"name": "math", "id": "builtin::reverse", "ratio": 0.5},
            {"name": "other", "id": "builtin::agree", "ratio": 0.5},
        ],
    },
    "eval": {"env": [{"name": "math", "id": "builtin::reverse@eval", "num_examples": 4}]},
    "dispatch": {"keep_equal_rewards": True},
    "trainer": {"bind": "tcp://127.0.0.1:0"},
    "http": {"port": 0},
}
"""Stands where a page says CONFIG."""


def of_all_pages(language: str) -> list[Any]:
    """Every block of a language as a test's parameters."""
    return [
        pytest.param(page, block, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, language))
    ]


def files_of(page: Path, directory: Path) -> None:
    """Write the files that a page prints."""
    for block in blocks(page, "python"):
        (directory / block.splitlines()[0].removeprefix("# ")).write_text(block)


def completed(page: Path, block: str) -> dict[str, Any]:
    """A configuration with what a block says, and the least of what it does not say."""
    found = tomllib.loads(block)
    domains: dict[str, Any] = {}
    for other in blocks(page, "toml"):
        domains |= tomllib.loads(other).get("domains", {})
    if "base_urls" not in found.get("inference", {}):
        found.setdefault("local", {})
    found.setdefault("train", {}).setdefault("env", [{"id": "builtin::reverse"}])
    return {**found, "domains": domains}


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    """Or a picture, a listing or a session with another program, which have no language."""
    fences = [
        fence
        for page in PAGES
        for fence in re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert set(fences) == {"", "sh", "toml", "python"}
    assert all(re.match(r"# \w+\.py\n", block) for page in PAGES for block in blocks(page, "python"))


@pytest.mark.parametrize(("page", "block"), of_all_pages("toml"))
def test_a_piece_of_a_configuration_can_be_used(page: Path, block: str, tmp_path: Path) -> None:
    """With the files that the same page prints beside it; the strategy is tried out, domains are loaded."""
    files_of(page, tmp_path)
    venvs = tmp_path / "venvs"
    for name in set(re.findall(r"/opt/venvs/(\w+)/", block)):
        (venvs / name / "bin").mkdir(parents=True, exist_ok=True)
        (venvs / name / "bin" / "python").symlink_to(sys.executable)
    values = completed(page, block.replace("/opt/venvs", str(venvs)))
    path = write_config(tmp_path / "config.toml", {**values, "http": {"port": 0}})
    # Libraries, servers and files that a reader has and this machine has not.
    elsewhere = [*(f"{loader}::" for loader in LOADERS if loader != "builtin"), "my_project", ".rl.svc"]
    here = not any(name in block for name in elsewhere)
    deep = ["--deep", "--trainer.bind=tcp://127.0.0.1:0"] if here else []
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "ray.py").touch()
    done = subprocess.run(
        [COMMAND, "check", path.name, *deep],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(libraries), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def commands() -> Iterator[Any]:
    for page in PAGES:
        for line in "".join(sh_blocks(page)).splitlines():
            yield pytest.param(line, id=f"{page.stem}: {line.partition('#')[0].strip()}")


@pytest.mark.parametrize("line", list(commands()))
def test_every_command_is_ours_or_installs_what_there_is(line: str) -> None:
    """Commands of make and ours are run by tests; of the others, only what is installed can be checked here."""
    words = re.sub(r"^([A-Z_]+=\S+ )*", "", line).split()
    if words[0] in ("kubectl", "docker", "sbatch", "vllm"):
        # Of a cluster or of an engine: that the files they name are there is all that can be seen from here.
        assert all((ROOT / word).exists() for word in words if word.startswith("deploy/"))
        return
    assert words[0] in ("make", "orchestrator", "python", "pip", "uv", "python3", "/opt/venvs/gym/bin/pip")
    assert set(re.findall(r"rollout-orchestrator\[([\w-]+)\]", line)) <= set(EXTRAS)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A directory with a configuration that is done in seconds."""
    write_config(tmp_path / "small.toml", SMALL)
    return tmp_path


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_the_configuration_block_of_the_readme_works_after_make_run(tmp_path: Path) -> None:
    """A variable, flags, both checks and the simulation, although the quickstart has a run directory already."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (block,) = [block for block in sh_blocks(README) if "ORCHESTRATOR__BATCH__SIZE" in block]
    first = run_all("orchestrator run configs/quickstart.toml --max_steps 1", tmp_path)
    done = run_all(block, tmp_path)
    assert (first.returncode, done.returncode) == (0, 0), first.stderr + done.stderr
    assert json.loads((tmp_path / "runs" / "other" / "summary.json").read_text())["sequences"] == 5 * 64
    simulations = re.findall(r"`(orchestrator simulate [^`]+)`", README.read_text(encoding="utf-8"))
    assert len(simulations) == 2
    for simulated in simulations:
        done = run_all(simulated, tmp_path)
        assert done.returncode == 0, done.stderr
        assert "delivered share" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_operating_it_work(small: Path) -> None:
    """Run, run anew, set back, evaluate; then look at a run while it runs, and change it. `view` has a test of its own."""
    (block,) = [block for block in sh_blocks(README) if "orchestrator status" in block]
    lines = (
        block.replace("CONFIG", "small.toml")
        .replace("RUN_DIR", "runs/small")
        .replace(" ... ", " ")
        .splitlines()
    )
    beside = [line for line in lines if "runs/small" in line and "orchestrator view" not in line]
    done = run_all("\n".join(line for line in lines if "small.toml" in line), small)
    assert done.returncode == 0, done.stderr
    endless = [str(COMMAND), "run", "small.toml", "--max_steps", "1000000"]
    with subprocess.Popen(
        endless, cwd=small, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        next(line for line in running.stdout if '"run.started"' in line)
        drained = threading.Thread(target=running.stdout.read)
        drained.start()
        shown = run_all("\n".join(beside), small)
        running.terminate()
        drained.join()
    assert shown.returncode == 0, shown.stderr
    assert len(beside) == 4
    for words in ("state: running", "groups: ", "paused: "):
        assert words in shown.stdout
    assert running.returncode == 128 + 15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_overrides_of_the_reference_work(small: Path) -> None:
    """One by a variable, two by flags; the same run goes on."""
    (block,) = sh_blocks(ROOT / "docs" / "configuration.md")
    done = run_all(block.replace("CONFIG", "small.toml"), small)
    assert done.returncode == 0, done.stderr


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_the_trainers_of_the_page_about_trainers_work(tmp_path: Path) -> None:
    """One goes on behind a checkpoint, the other serves as rank 0 to the end of the run."""
    port = free_port()
    page = ROOT / "docs" / "trainer.md"
    files_of(page, tmp_path)
    for name in ("trainer.py", "resuming.py"):
        text = (tmp_path / name).read_text()
        assert "tcp://127.0.0.1:5555" in text
        (tmp_path / name).write_text(text.replace("5555", str(port)))
    values = {**SMALL, "local": {"trainer": False}, "trainer": {"bind": f"tcp://127.0.0.1:{port}"}}
    write_config(tmp_path / "small.toml", {**values, "max_steps": 6})
    with subprocess.Popen([COMMAND, "run", "small.toml"], cwd=tmp_path, stdout=subprocess.DEVNULL) as service:
        with TrainerClient(f"tcp://127.0.0.1:{port}", rank=0, world_size=1) as trainer:
            for batch in trainer:
                if batch.step == 3:
                    break
        resumed = run_all("python resuming.py", tmp_path)
        assert resumed.stdout == "goes on with step 4\n", resumed.stderr
        trained = run_all("python trainer.py", tmp_path)
        assert trained.returncode == 0, trained.stderr
        assert trained.stdout.splitlines()[-1] == "the run is over: max_steps reached"
        assert service.wait(300) == 0


async def test_the_trainer_that_lays_sequences_out_works(tmp_path: Path) -> None:
    """It goes through every batch and reports its numbers, which are finite or would be refused."""
    reported: list[tuple[int, set[str]]] = []

    def on_report(step: int, metrics: Mapping[str, float]) -> str:
        reported.append((step, set(metrics)))
        return ""

    async with make_server(bind="tcp://127.0.0.1:*", world_size=1, on_report=on_report) as server:
        for step in (1, 2):
            server.offer(make_batch(step))
        server.finish("max_steps")
        files_of(ROOT / "docs" / "trainer.md", tmp_path)
        script = tmp_path / "laying_out.py"
        script.write_text(script.read_text().replace("tcp://127.0.0.1:5555", server.address))
        done = await asyncio.to_thread(run_all, "python laying_out.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in reported] == [1, 2]
    assert {"loss", "logprob_mismatch", "staleness_mean"} <= reported[0][1]


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_the_programs_that_run_the_service_themselves_work(small: Path) -> None:
    """The one of the README with nothing beside it, the one of the page about trainers with a configuration."""
    files_of(README, small)
    learnt = run_all("python learn.py", small)
    assert learnt.returncode == 0, learnt.stderr
    assert [line.split()[0] for line in learnt.stdout.splitlines()[:3]] == ["1", "2", "3"]
    assert len(json.loads(learnt.stdout.splitlines()[3])) == 4
    files_of(ROOT / "docs" / "trainer.md", small)
    ended = run_all("python one_program.py small.toml", small)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "the run is over: max_steps reached\n"
    assert json.loads((small / "runs" / "small" / "summary.json").read_text())["version"] == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_about_rollouts_works(small: Path) -> None:
    """After a run, every command finds something, and so does the program."""
    page = ROOT / "docs" / "rollouts.md"
    files_of(page, small)
    assert run_all("orchestrator run small.toml", small).returncode == 0
    (block,) = sh_blocks(page)
    for line in block.replace("RUN_DIR", "runs/small").splitlines():
        done = run_all(line, small)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    shown = run_all("orchestrator rollouts runs/small --show math/train/0", small)
    assert "user\n  reverse" in shown.stdout
    assert len((small / "evals.jsonl").read_text().splitlines()) >= 4
    looked = run_all("python look.py runs/small", small)
    assert looked.returncode == 0, looked.stderr
    assert "math: " in looked.stdout
    assert "groups trained" in looked.stdout
