"""`orchestrator eval`: the evaluations alone, as a command, against a real policy server."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

CONFIG = """\
run_dir = "{run_dir}"
[local]
[[train.env]]
id = "builtin::reverse"
ratio = 1.0
[eval]
num_examples = 3
rollouts_per_example = 2
sampling = {{ max_tokens = 8 }}
[[eval.env]]
id = "builtin::reverse"
[[eval.env]]
id = "builtin::agree"
"""

LOCAL = """\
run_dir = "{run_dir}"
[local]
"""


EMPTY = """
[[eval.env]]
id = "halves:Halves"
num_examples = 4
"""

HALVES = """
from envs.builtin.reverse import Reverse


class Halves(Reverse):
    def tasks(self, split):
        return super().tasks(split) if split == "train" else []
"""


async def run_eval(
    tmp_path: Path, *options: str, more: str = "", command: str = "eval", base: str = CONFIG
) -> tuple[int | None, str, str]:
    config = tmp_path / "eval.toml"
    config.write_text(base.format(run_dir=tmp_path / "run") + more)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", "import sys; from orchestrator.cli import main; sys.exit(main())"),
        *(command, str(config), *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


async def test_every_env_is_evaluated_once_and_printed_as_json(tmp_path: Path) -> None:
    """One line per env with avg@k, pass@k and failures; also for an env that scores whole groups."""
    code, out, errors = await run_eval(tmp_path, "--json")
    assert code == 0, errors
    results = {result["env"]: result for result in map(json.loads, out.splitlines())}
    assert set(results) == {"eval-builtin::reverse", "eval-builtin::agree"}
    for result in results.values():
        assert (result["tasks"], result["k"], result["rollouts"], result["failures"]) == (3, 2, 6, 0)
        assert 0 <= result["avg@2"] <= 1
        assert 0 <= result["pass@1"] <= result["pass@2"] <= 1


async def test_a_table_is_printed_for_people(tmp_path: Path) -> None:
    """Names, tasks and scores; nothing is trained, so there is no journal."""
    code, out, errors = await run_eval(tmp_path)
    assert code == 0, errors
    assert "builtin::agree" in out
    assert "avg@k" in out
    assert not (tmp_path / "run" / "journal").exists()


@pytest.mark.parametrize("command", ["eval", "run"])
async def test_an_evaluation_without_tasks_is_refused_at_the_start(tmp_path: Path, command: str) -> None:
    """Nothing waits for an evaluation that cannot end, neither at once nor after the last step of a run."""
    (tmp_path / "halves.py").write_text(HALVES)
    ports = ("--http.port", "0", "--trainer.bind", "tcp://127.0.0.1:*")
    code, _, errors = await run_eval(tmp_path, *ports, "--max_steps", "1", more=EMPTY, command=command)
    assert code == 3, errors
    assert 'env "eval-halves:Halves": split "eval" has no tasks; name another, or remove it' in errors


@pytest.mark.parametrize("ratio", ["", "ratio = 1.0\n"])
async def test_training_without_tasks_is_refused_with_the_split(tmp_path: Path, ratio: str) -> None:
    """Whether its weight comes from a ratio or from the number of its tasks."""
    (tmp_path / "halves.py").write_text(HALVES)
    ports = ("--http.port", "0", "--trainer.bind", "tcp://127.0.0.1:*")
    more = f'[[train.env]]\nid = "halves:Halves@eval"\n{ratio}'
    code, _, errors = await run_eval(tmp_path, *ports, more=more, command="run", base=LOCAL)
    assert code == 2, errors
    assert 'env "halves:Halves@eval": split "eval" has no tasks; name another, or remove the env' in errors
