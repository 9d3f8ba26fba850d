"""The README describes the present: its commands exist, its configurations load, its examples run, its links lead somewhere."""

import argparse
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.cli import build_parser
from orchestrator.config import load_config
from orchestrator.mix import build_mix

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = Path(sys.executable).parent / "orchestrator"


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands() -> Iterator[list[str]]:
    """The words of every command in the README's shell blocks and of those it names in passing."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    lines += re.findall(r"`((?:make|orchestrator) [^`]+)`", README)
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


MADE = [words for words in commands() if words[0] == "make"]
RUN = [words for words in commands() if words[0] == "orchestrator"]


def parsed(words: list[str]) -> argparse.Namespace:
    """A command line as the command itself understands it, with a configuration where it says CONFIG."""
    words = ["configs/quickstart.toml" if word == "CONFIG" else word for word in words[1:]]
    arguments, rest = build_parser().parse_known_args(words)
    assert not rest or arguments.takes_overrides
    arguments.overrides = rest
    return arguments


def test_there_are_commands_to_look_at() -> None:
    """The patterns above find what they are meant to find."""
    assert ["make", "run"] in MADE
    assert ["make", "test"] in MADE
    assert len(RUN) >= 8


@pytest.mark.parametrize("words", MADE, ids=" ".join)
def test_every_make_target_exists(words: list[str]) -> None:
    """make knows it, with what the README passes to it."""
    done = subprocess.run(
        ["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_every_command_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options exist, and a configuration that it names loads with the overrides that it shows."""
    monkeypatch.chdir(ROOT)
    if words[-1] in ("serve", "check"):  # named in passing, without its arguments
        words = [*words, "x"]
    arguments = parsed(words)
    if getattr(arguments, "takes_overrides", False) and Path(arguments.config).exists():
        load_config(arguments.config, arguments.overrides)


def test_the_first_two_commands_are_the_newcomers() -> None:
    """Whoever reads no further can run and test."""
    first = [shlex.split(line, comments=True) for line in blocks("sh")[0].splitlines()]
    assert first == [["make", "run"], ["make", "test"]]


def test_the_table_of_configurations_is_complete() -> None:
    """Every shipped file is in it."""
    shipped = {path.name for path in (ROOT / "configs").glob("*.toml")}
    assert set(re.findall(r"^\| \[(\w+\.toml)\]", README, re.MULTILINE)) == shipped


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file of the checkout."""
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_map_of_the_code_names_what_there_is() -> None:
    """Every module and package in the table exists."""
    rows = re.findall(r"^\| (`(?:orchestrator|envs)/[^|]+) \|", README, re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            folder = name.split("/")[0] if "/" in name and not folder else folder
            pattern = name if "/" in name and name.startswith(folder) else f"{folder}/{name}"
            assert list(ROOT.glob(pattern)), f"{pattern} is in the README, but not in the checkout"


def test_the_map_of_the_code_leaves_no_room_out() -> None:
    """Every folder of the package is in the table."""
    table = README.partition("## Read the code")[2].partition("## Develop")[0]
    named = {name.strip("/").rpartition("/")[2] for name in re.findall(r"`([\w/]+/)`", table)}
    rooms = {path.parent.name for path in (ROOT / "orchestrator").glob("*/__init__.py")}
    assert rooms | {"envs"} == named


def example(name: str) -> str:
    """The Python block that says it is the file of that name."""
    (found,) = [block for block in blocks("python") if block.startswith(f"# {name}\n")]
    return found


def test_the_environment_of_the_readme_runs(tmp_path: Path) -> None:
    """Copied as it stands and tried with the command that is printed below it."""
    (tmp_path / "spelling.py").write_text(example("spelling.py"))
    (words,) = [words for words in RUN if words[1:3] == ["env", "try"]]
    done = subprocess.run(
        [COMMAND, *words[1:], "-n", "2"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Spell cat." in done.stdout


def test_the_mix_strategy_of_the_readme_keeps_its_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied as it stands and named as the configuration below it does."""
    (tmp_path / "furthest_behind.py").write_text(example("furthest_behind.py"))
    monkeypatch.syspath_prepend(tmp_path)
    mix = build_mix("furthest_behind:FurthestBehind", ["a", "b", "c"], [0.5, 0.5, 0.0], rng=random.Random(0))
    picked = []
    for _ in range(100):
        env = mix.pick()
        picked.append(env)
        mix.on_dispatch(env, 8, now=0.0)
        mix.on_finish(env, 8, 8 if env == "a" else 4, now=1.0)
    assert picked.count("c") == 0
    # Half of b's rollouts are accepted, so that it has to be picked twice as often.
    assert picked.count("b") == pytest.approx(2 * picked.count("a"), abs=2)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.splitlines()[0])
def test_every_python_example_is_python(block: str) -> None:
    """At least it compiles."""
    compile(block, "README.md", "exec")
