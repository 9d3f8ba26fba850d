"""Trees of made-up benchmarks, for tests of what runs them."""

import shutil
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.runner import ROOT

Write = Callable[..., Path]


@pytest.fixture
def write_tree(tmp_path: Path) -> Write:
    """Writes a tree with these benchmarks, each given by the body of its module."""

    def write(name: str = "tree", **modules: str) -> Path:
        package = tmp_path / name / "benchmarks"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        shutil.copy(ROOT / "benchmarks" / "frame.py", package)
        head = "from benchmarks.frame import *\n\n"
        for module, body in modules.items():
            (package / f"{module}.py").write_text(head + textwrap.dedent(body), encoding="utf-8")
        return package.parent

    return write


def figure_of(value: str) -> str:
    """The body of a benchmark whose figure is an expression."""
    return f"""
    def figures(effort):
        return [Figure("speed", {value}, "µs", 8.0, "a peer", "< 5 µs", {value} < 5)]
    """


def commit(tree: Path) -> None:
    """Make a repository of the tree, or add what changed to it."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a step"]):
        subprocess.run([*git, *words], cwd=tree, check=True)
