"""`check --deep` finds what only shows when it is tried: environments, inference servers, run directories; all at once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from envs.report import unfit_args
from orchestrator.config import load_config
from orchestrator.local.server import run_policy_server
from orchestrator.service.deep_check import Findings, look_deep
from tests.integration.service_fixture import write_config
from tests.support.inference_engine import ScriptedEngine
from tests.support.ports import free_port

MODULE = """
from envs import Environment


class Words(Environment):
    def __init__(self, words: list[str], first: int = 0, anything=None) -> None:
        self.words = words[first:]

    def tasks(self, split):
        return [{"word": word} for word in self.words]

    async def rollout(self, task, model):
        return model.rollout(reward=0.0)


class BySplit(Words):
    def tasks(self, split):
        return [{"word": word, "split": split} for word in self.words]


class Texts(Words):
    def tasks(self, split):
        return self.words
"""


async def looked(directory: Path, **sections: Any) -> Findings:
    """What is found in a configuration with these tables."""
    values: dict[str, Any] = {
        "run_dir": str(directory / "run"),
        "local": {},
        "train": {"env": [{"id": "builtin::reverse"}]},
        "trainer": {"bind": "tcp://127.0.0.1:0"},
        "http": {"port": 0},
    }
    values = {key: value for key, value in (values | sections).items() if value is not None}
    found = await look_deep(load_config(write_config(directory / "config.toml", values)))
    assert not (directory / "run").exists()
    return found


def env(kind: str, **args: Any) -> dict[str, Any]:
    return {"name": kind.lower(), "id": f"words_to_check:{kind}", "args": args, "ratio": 1}


async def test_every_environment_is_loaded_and_all_problems_are_told(tmp_path: Path) -> None:
    """By a process of its own each; one that cannot be loaded does not hide another."""
    (tmp_path / "words_to_check.py").write_text(MODULE)
    envs = [
        env("Words", words="cat"),
        env("Word", words=["cat"]),
        env("Texts", words=["cat"]),
        env("BySplit", words=["cat"], first=7),
        {"name": "gone", "id": "builtin::revers", "ratio": 1},
        {"name": "other", "id": "builtin::reverse", "python": "/opt/no/python", "ratio": 1},
    ]
    found = await looked(tmp_path, train={"env": envs})
    told = "\n".join(found.problems)
    assert "env \"words\": args: words = 'cat' is not what its constructor declares, list[str]" in told
    assert 'module words_to_check has no "Word"; did you mean "Words"?' in told
    assert 'env "texts": split "train": task 0 is a str, not a mapping' in told
    assert 'env "bysplit": split "train": there are no tasks' in told
    assert 'env "gone": there is no built-in environment "revers"; did you mean "reverse"?' in told
    assert 'env "other": python = "/opt/no/python" is not an interpreter' in told
    assert len(found.problems) == 6


async def test_an_evaluation_of_the_training_tasks_is_pointed_out(tmp_path: Path) -> None:
    """It works, and measures something else than was meant; one that looks at the split is not mentioned."""
    (tmp_path / "words_to_check.py").write_text(MODULE)
    both = [env("Words", words=["cat", "dog"]), env("BySplit", words=["cat", "dog"])]
    evaluated = [{key: value for key, value in table.items() if key != "ratio"} for table in both]
    found = await looked(tmp_path, train={"env": both}, eval={"env": evaluated})
    assert found.problems == []
    (warning,) = found.warnings
    assert warning.startswith('eval env "words" begins with the tasks of train env "words"')
    assert "does its tasks(split) look at the split?" in warning


@asynccontextmanager
async def answering(path: str, status: int = 200) -> AsyncIterator[str]:
    """A server that names its model at one path; its address without the path."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "served"}]}, status=status)

    app = web.Application()
    app.router.add_get(path, models)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_every_inference_server_is_asked_for_the_model(tmp_path: Path) -> None:
    """Down, without the model, at another path, and behind a key: each is told with its address and a remedy."""
    async with (
        run_policy_server() as fine,
        answering("/models") as without,
        answering("/v1/models") as with_it,
        answering("/v1/models", status=401) as guarded,
    ):
        down = f"http://127.0.0.1:{free_port()}/v1"
        urls = [fine, f"{without}/v1", f"{with_it}/v1", f"{with_it}/api", f"{guarded}/v1", down]
        found = await looked(tmp_path, local=None, inference={"base_urls": urls})
    told = "\n".join(found.problems)
    assert f"{fine}:" not in told
    assert f"{without}/v1: /models answers 404 and names no model; {without} does, did you mean that?" in told
    assert f'{with_it}/v1: it does not serve model.name = "local"; it serves served' in told
    assert (
        f"{with_it}/api: /models answers 404 and names no model; {with_it}/v1 does, did you mean that?"
        in told
    )
    assert f"{guarded}/v1: it answers 401; set inference.api_key_env" in told
    assert f"{down}: it does not answer" in told
    assert len(found.problems) == 5


async def test_an_inference_server_whose_log_probabilities_cannot_be_trained_on_is_told(
    tmp_path: Path,
) -> None:
    """With the remedy, before the run is started."""
    train = {"sampling": {"temperature": 0.7}, "env": [{"id": "builtin::reverse"}]}
    async with ScriptedEngine(logprobs_mode="raw_logprobs") as engine:
        inference = {"base_urls": [engine.base_url]}
        found = await looked(tmp_path, local=None, model={"name": "tiny"}, inference=inference, train=train)
    [problem] = found.problems
    assert "--logprobs-mode processed_logprobs" in problem
    assert 'env "builtin::reverse" is trained with temperature = 0.7' in problem


async def test_a_server_elsewhere_that_is_not_there_is_told_soon(tmp_path: Path) -> None:
    """A run would wait for it; a check says so."""
    address = f"tcp://127.0.0.1:{free_port()}"
    found = await looked(tmp_path, train={"env": [{"id": "builtin::agree", "addresses": [address]}]})
    (problem,) = found.problems
    assert address in problem


async def test_sources_are_looked_at_and_whoever_they_name_is_tried(tmp_path: Path) -> None:
    """A file that is not there, a name of nobody, a server that does not answer: each is told with its source."""
    (tmp_path / "engines.txt").write_text("http://127.0.0.1:9/v1\n")
    (tmp_path / "nobody.txt").write_text("# nobody\n")
    (tmp_path / "servers.txt").write_text("tcp://127.0.0.1:9\n")
    found = await looked(
        tmp_path,
        local=None,
        inference={"base_urls": ["file:engines.txt", "file:gone.txt"]},
        train={
            "env": [
                {
                    "id": "builtin::reverse",
                    "addresses": "file:servers.txt",
                    "ready_timeout_s": 0.2,
                    "ratio": 1,
                },
                {"id": "builtin::larger", "addresses": ["file:nobody.txt"], "ratio": 1},
            ]
        },
    )
    told = "\n".join(found.problems)
    assert "inference server http://127.0.0.1:9/v1" in told
    assert "inference.base_urls: file:gone.txt: " in told
    assert "not ready in 0.2 s at tcp://127.0.0.1:9" in told
    assert 'env "builtin::larger": file:nobody.txt names no server' in told
    assert len(found.problems) == 4


async def test_a_run_directory_that_is_a_file_is_told(tmp_path: Path) -> None:
    """Before a run fails to make it."""
    (tmp_path / "taken").write_text("")
    values = {"local": {}, "train": {"env": [{"id": "reverse"}]}, "http": {"port": 0}}
    path = write_config(tmp_path / "config.toml", {**values, "run_dir": str(tmp_path / "taken" / "run")})
    found = await look_deep(load_config(path, ["--trainer.bind=tcp://127.0.0.1:0"]))
    assert found.problems == [f"run_dir: {tmp_path / 'taken'} is not a directory"]


@pytest.mark.parametrize(
    ("args", "misfits"),
    [
        ({"size": 3, "rate": 1, "label": "x"}, []),
        ({"size": "3"}, ["size = '3' is not what its constructor declares, int"]),
        ({"rate": "fast"}, ["rate = 'fast' is not what its constructor declares, float"]),
        ({"place": "runs"}, []),
        ({"other": 3}, []),
        ({"label": None}, []),
    ],
)
def test_args_are_held_against_the_declared_types(args: dict[str, Any], misfits: list[str]) -> None:
    """Types that TOML cannot express, and arguments without any, are let through."""

    def make(size: int, rate: float, place: Path, other, label: str | None = None) -> None:  # type: ignore[no-untyped-def]  # one has no type
        """What an environment's factory looks like."""

    assert unfit_args(make, args) == misfits
