"""An environment of the Hub, by the two commands of docs/environments.md; the Hub's index is one of this test's own."""

import re
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.adapters.conftest import Driver, driver
from tests.adapters.venvs import CHECKOUT, CLASSIC, V1

PAGE = (CHECKOUT / "docs" / "environments.md").read_text(encoding="utf-8")
FOUND = re.search(
    r"^uv pip install (\w+) --index https://hub\.primeintellect\.ai/(\w+)/simple/\n"
    r"orchestrator env try (verifiers::\S+)$",
    PAGE,
    re.MULTILINE,
)
MODULE = """
import verifiers as vf
from datasets import Dataset


def load_environment():
    rows = Dataset.from_dict({"question": ["Say stone"], "answer": ["stone"]})
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[lambda completion, answer: 1.0]))
"""


class Index(SimpleHTTPRequestHandler):
    """Lists folders, which is all that an index has to do."""

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """The address of an index whose owner has one package."""
    assert FOUND is not None, "the page names the two commands"
    name, owner, _ = FOUND.groups()
    folder = tmp_path / "hub" / owner / "simple" / name
    folder.mkdir(parents=True)
    about = f"{name}-0.1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", MODULE)
        wheel.writestr(
            f"{about}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\nRequires-Dist: verifiers\n",
        )
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Index, directory=str(tmp_path / "hub"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{owner}/simple/"
        server.shutdown()


def test_an_environment_of_the_hub_is_installed_and_runs_by_its_name_there(
    hub: str, tmp_path: Path, classic: Driver
) -> None:
    """The owner is part of the name; the package is listed, loads, and is played."""
    assert FOUND is not None
    if V1.missing():
        pytest.skip(f"uv is in the other virtualenv: {V1.missing()}")
    name, _, env_id = FOUND.groups()
    place = tmp_path / "installed"
    words = [
        "pip",
        "install",
        name,
        "--index",
        hub,
        "--no-deps",
        "--target",
        place,
        "--python",
        CLASSIC.python,
    ]
    subprocess.run([V1.python.with_name("uv"), *words], check=True, capture_output=True)
    for running in driver(CLASSIC, place):
        assert name in running.names("verifiers")
        assert running.rollout(env_id)["rollouts"][0]["reward"] == 1.0
