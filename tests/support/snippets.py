"""Snippets of the pages: how they are found, and how a reader would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
COMMAND = BIN / "orchestrator"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page that are in a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def sh_blocks(page: Path) -> list[str]:
    return blocks(page, "sh")


def python_block(page: Path, name: str) -> str:
    """The Python block that says it is the file of that name."""
    (found,) = [block for block in blocks(page, "python") if block.startswith(f"# {name}\n")]
    return found


def run_all(script: str, where: Path) -> subprocess.CompletedProcess[str]:
    """A block of commands as a shell runs it, up to the first that fails; `orchestrator` and `python` are ours."""
    return subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=where,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
