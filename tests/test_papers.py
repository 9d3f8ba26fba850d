"""The papers around the code say what is true of it: licence, version, changelog, rooms, walks, decisions, make targets."""

import importlib
import re
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from orchestrator import __version__
from orchestrator.config import Config, table_model
from orchestrator.dispatch.waits import WaitKind

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOMS = sorted(path.parent.name for path in (ROOT / "orchestrator").glob("*/__init__.py"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]


def test_the_version_stands_once() -> None:
    """The package has it; the metadata reads it there, and the changelog has a chapter for it."""
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "orchestrator.__version__"}
    assert f"## [{__version__}]" in CHANGELOG
    assert CHANGELOG.index("## [Unreleased]") < CHANGELOG.index(f"## [{__version__}]")


def test_the_licence_is_the_declared_one() -> None:
    """The full text is there, and the metadata names it."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert PROJECT["project"]["license-files"] == ["LICENSE"]
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "Copyright The rollout orchestrator authors" in text
    assert "[yyyy]" not in text


def test_the_floor_plan_has_every_room() -> None:
    """Each folder of the package is in the picture, in the order of the contract, and nothing else is."""
    picture = CONTRIBUTING.partition("```\n  cli")[2].partition("```")[0]
    rooms = [name for line in ("  cli" + picture).splitlines() for name in _rooms_of(line)]
    (layers,) = [
        contract["layers"]
        for contract in PROJECT["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    ]
    contract = [name.removeprefix("orchestrator.") for layer in layers for name in layer.split(" | ")]
    folders = {path.parent.name for path in (ROOT / "orchestrator").glob("*/__init__.py")}
    assert rooms == [*contract, "envs"]
    assert set(contract) == folders


def _rooms_of(line: str) -> list[str]:
    """The names at the beginning of a line: one, or several with bars between them."""
    found = re.match(r"  ([a-z_]+(?: \| [a-z_]+)*)(?:\s{2,}|$)", line)
    return found[1].split(" | ") if found else []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file of the checkout."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    relative = [link for link in links if "://" not in link]
    assert [link for link in relative if not (page.parent / link).exists()] == []


def test_the_architecture_has_a_paragraph_about_every_room() -> None:
    """What it owns and what it does not."""
    told = re.findall(r"(?:^|\. )\*\*(\w+)\*\*", ARCHITECTURE, re.MULTILINE)
    assert sorted(told) == sorted([*ROOMS, "envs"])


def test_the_table_of_waits_has_every_kind_once() -> None:
    """Whatever a run can wait for has an event, a sender, a bound and a sentence there."""
    table = ARCHITECTURE.partition("### Everything that is waited for")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == [kind.value for kind in WaitKind]
    assert [row[0] for row in rows if len(row) != 6 or not all(row)] == []


@pytest.mark.parametrize(
    "hop", sorted(set(re.findall(rf"`((?:{'|'.join(ROOMS)}|envs)\.[\w.]*\w)`", ARCHITECTURE)))
)
def test_every_hop_of_a_walk_is_in_the_code(hop: str) -> None:
    """A module, class, function or setting of that name is there."""
    table, _, key = hop.partition(".")
    field = Config.model_fields.get(table)
    section = table_model(field.annotation) if field is not None else None
    assert (section is not None and key in section.model_fields) or _is_in_the_code(hop)


def _is_in_the_code(hop: str) -> bool:
    words = hop.split(".") if hop.startswith("envs.") else ["orchestrator", *hop.split(".")]
    found: object = importlib.import_module(words[0])
    for number, word in enumerate(words[1:], start=1):
        if not hasattr(found, word) and find_spec(".".join(words[: number + 1])) is not None:
            importlib.import_module(".".join(words[: number + 1]))
        if not hasattr(found, word):
            return False
        found = getattr(found, word)
    return True


def test_every_decision_is_in_the_list() -> None:
    """Numbered without gaps, each with a line in the index under its own number."""
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\d+)\]\(([^)]+)\)", index, re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [
        (number, path.name) for number, path in enumerate(DECISIONS, start=1)
    ]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_says_what_why_and_what_follows(page: Path) -> None:
    """In one page, and the code that it names is there."""
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {int(page.name[:4])}. ")
    for word in ("**Decided.**", "**Why.**", "**What follows.**", "**Think again**"):
        assert word in text
    assert len(text.split()) < 500
    named = re.findall(r"`((?:orchestrator|envs|tests)/[\w/]+\.py)`", text)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", CONTRIBUTING + CHANGELOG)))
)
def test_every_make_target_exists(target: str) -> None:
    """make knows what the pages tell people to run."""
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_examples_are_quoted_from_the_code() -> None:
    """A style guide whose examples are gone from the code describes another house."""
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("orchestrator", "envs", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
    )
    for block in re.findall(r"^```python\n(.*?)^```$", CONTRIBUTING, re.DOTALL | re.MULTILINE):
        for line in block.strip().splitlines():
            assert line.strip() in code, line
