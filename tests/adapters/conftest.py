"""Processes that run the adapters inside their libraries' virtualenvs."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.venvs import (
    ATROPOS,
    CHECKOUT,
    CLASSIC,
    DATASET,
    INSPECT,
    OPENENV,
    REASONING_GYM,
    TEXTARENA,
    V1,
    Venv,
)

HERE = Path(__file__).parent


class Driver:
    """A `driver.py` in a virtualenv, asked one scenario at a time."""

    def __init__(self, venv: Venv, home: Path, *places: Path) -> None:
        # Only `envs` of the checkout is on the path: an env server's interpreter has nothing else of ours.
        (home / "envs").symlink_to(CHECKOUT / "envs")
        _write_uv(home / "bin" / "uv", venv)
        path = os.pathsep.join(map(str, (home, HERE / "environments", *places)))
        environment = {name: value for name, value in os.environ.items() if not name.endswith("API_KEY")} | {
            "PYTHONPATH": path,
            "PATH": os.pathsep.join((str(home / "bin"), str(venv.python.parent), os.environ["PATH"])),
            "HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "VF_LOG_LEVEL": "ERROR",
            "PYTHONHASHSEED": "0",  # as in every env server
        }
        self._log = (home / "log").open("w+")
        self._process = subprocess.Popen(
            [venv.python, HERE / "driver.py"],
            env=environment,
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def play(
        self,
        id: str,  # noqa: A002  as in the config
        runs: list[dict[str, Any]] | None = None,
        **scenario: Any,
    ) -> dict[str, Any]:
        """What came of the runs."""
        return self._ask({"turns": [[{"content": "…"}]], **scenario, "id": id, "runs": runs or [{}]})

    def names(self, loader: str) -> list[str]:
        """What a loader can load."""
        names: list[str] = self._ask({"names": loader})["names"]
        return names

    def call(self, function: str, **args: Any) -> Any:
        """What a function of the environments' modules returns there."""
        return self._ask({"call": function, "args": args})["returned"]

    def _ask(self, scenario: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(scenario) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            pytest.fail(f"the driver ended:\n{self._log.read()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def rollout(self, id: str, **scenario: Any) -> dict[str, Any]:  # noqa: A002  as in the config
        """The answer to the only run of a scenario."""
        played = self.play(id, **scenario)
        answer: dict[str, Any] = played["answers"][0]
        return answer | {"requests": played["requests"]}

    def close(self) -> None:
        """End the process and see that it ended well."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._process.stdout.close()
            self._log.close()


def _write_uv(path: Path, venv: Venv) -> None:
    """A `uv` that resolves nothing: what the libraries' own programs need is in the virtualenv.

    The real one asks the package index at the start of every program, which a test must not depend on.
    """
    path.parent.mkdir()
    path.write_text(
        f'#!/bin/sh\ncase "$*" in\n*--help*) echo --script ;;\n"python find"*) echo {venv.python} ;;\n'
        '"sync --script"*) ;;\n*) echo "not for tests: uv $*" >&2; exit 1 ;;\nesac\n',
        encoding="utf-8",
    )
    path.chmod(0o755)


def driver(venv: Venv, *places: Path) -> Iterator[Driver]:
    """One for as long as a test has it; `places` are searched for modules too."""
    reason = venv.missing()
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as home:
        running = Driver(venv, Path(home), *places)
        yield running
        running.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks for a library's virtualenv is a test of `make test-adapters`; the others need nothing foreign."""
    for item in items:
        if {
            "reasoning_gym",
            "classic",
            "v1",
            "dataset",
            "openenv",
            "atropos",
            "textarena",
            "inspect_ai",
            "ray",
        } & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.adapters)


@pytest.fixture(scope="session")
def reasoning_gym() -> Iterator[Driver]:
    yield from driver(REASONING_GYM)


@pytest.fixture(scope="session")
def reasoning_gym_again() -> Iterator[Driver]:
    """A second process."""
    yield from driver(REASONING_GYM)


@pytest.fixture(scope="session")
def classic() -> Iterator[Driver]:
    yield from driver(CLASSIC)


@pytest.fixture(scope="session")
def v1() -> Iterator[Driver]:
    yield from driver(V1)


@pytest.fixture(scope="session")
def dataset() -> Iterator[Driver]:
    yield from driver(DATASET)


@pytest.fixture(scope="session")
def openenv() -> Iterator[Driver]:
    yield from driver(OPENENV)


@pytest.fixture(scope="session")
def atropos() -> Iterator[Driver]:
    yield from driver(ATROPOS)


@pytest.fixture(scope="session")
def textarena() -> Iterator[Driver]:
    yield from driver(TEXTARENA)


@pytest.fixture(scope="session")
def inspect_ai() -> Iterator[Driver]:
    yield from driver(INSPECT)
