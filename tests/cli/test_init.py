"""`init` writes a project whose parts run as printed; `schema` is what editors are told, and what the files name."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import build_parser, main
from orchestrator.config.schema import render_schema
from tests.support.ports import free_port
from tests.support.snippets import COMMAND, python_block, run_all, sh_blocks

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))
FILES = ["README.md", "config.toml", "schema.json", "spelling.py", "test_spelling.py", "trainer.py"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What `init` wrote, with ports of its own."""
    directory = tmp_path / "project"
    assert main(["init", str(directory)]) == 0
    return directory


def test_a_project_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All its files, and what to do next."""
    assert main(["init", str(tmp_path / "a" / "project")]) == 0
    assert sorted(path.name for path in (tmp_path / "a" / "project").iterdir()) == FILES
    assert "orchestrator check config.toml --deep" in capsys.readouterr().out


def test_nothing_is_overwritten(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second time it refuses, names what is there, and writes nothing, not even what is missing."""
    (project / "spelling.py").write_text("mine")
    (project / "trainer.py").unlink()
    assert main(["init", str(project)]) == 2
    assert "spelling.py" in capsys.readouterr().err
    assert (project / "spelling.py").read_text() == "mine"
    assert not (project / "trainer.py").exists()


def test_a_directory_that_cannot_be_made_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in its place, for instance."""
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / "file" / "project")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["spelling.py", "trainer.py"])
def test_the_readme_prints_the_same_files(project: Path, name: str) -> None:
    """Whoever copies from the README has what `init` writes."""
    assert python_block(ROOT / "README.md", name) == (project / name).read_text()


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_the_projects_readme_works_as_printed(project: Path) -> None:
    """Test, try, check, run and train, each command as it stands; the policy learns what the environment rewards."""
    port = str(free_port())
    for name in ("config.toml", "trainer.py"):
        text = (project / name).read_text()
        (project / name).write_text(text.replace("5555", port))
    config = (project / "config.toml").read_text()
    (project / "config.toml").write_text(f'{config}[trainer]\nbind = "tcp://127.0.0.1:{port}"\n')
    looking, checking, running, training = sh_blocks(project / "README.md")
    for script in (looking, checking):
        done = run_all(script, project)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in done.stderr
    with (
        subprocess.Popen(
            [COMMAND, *running.split()[1:]], cwd=project, stdout=subprocess.PIPE, text=True
        ) as service,
        subprocess.Popen([sys.executable, *training.split()[1:]], cwd=project) as trainer,
    ):
        said, _ = service.communicate(timeout=400)
        assert service.returncode == 0, said
        assert trainer.wait(timeout=100) == 0
    summary = json.loads((project / "runs" / "spelling" / "summary.json").read_text())
    assert summary["steps"] == 20
    # Chance pays 0.003, and each of the five characters 0.2: at least one is learned, mostly three.
    assert summary["last_reward"] > 0.15


def test_the_schema_file_is_up_to_date() -> None:
    """configs/schema.json is what `orchestrator schema` prints."""
    assert (ROOT / "configs" / "schema.json").read_text(encoding="utf-8") == render_schema(), (
        "run `make docs`"
    )


def test_schema_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON, with the text of every setting."""
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    size = schema["$defs"]["BatchConfig"]["properties"]["size"]
    assert (size["minimum"], size["default"]) == (1, 256)
    assert "Sequences in a batch" in size["description"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_file_names_the_schema(path: Path) -> None:
    """In a comment of its head, where editors look for it; and it keeps to it."""
    text = path.read_text(encoding="utf-8")
    head = text.split("\nrun_dir", 1)[0].splitlines()
    (named,) = [line.removeprefix("#:schema ") for line in head if line.startswith("#:schema")]
    assert named.startswith(".")
    assert (path.parent / named).resolve() == ROOT / "configs" / "schema.json"
    schema = json.loads(render_schema())
    assert unknown(tomllib.loads(text), schema, schema) == []


def test_an_unknown_key_is_not_in_the_schema() -> None:
    """Editors mark it."""
    schema = json.loads(render_schema())
    assert unknown({"batch": {"sise": 1}, "mix": {"breaker": False}}, schema, schema) == ["sise"]


def unknown(value: object, node: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Keys that the schema does not have where they stand; it follows tables and lists, as editors do."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    if isinstance(value, list):
        return [key for item in value for key in unknown(item, node.get("items", {}), schema)]
    if not isinstance(value, dict):
        return []
    if "anyOf" in node:
        node = next((choice for choice in node["anyOf"] if "$ref" in choice), node)
        return unknown(value, node, schema)
    properties, more = node.get("properties", {}), node.get("additionalProperties", True)
    found = []
    for key, inner in value.items():
        if key not in properties and more is False:
            found.append(key)
        found += unknown(inner, properties.get(key, more if isinstance(more, dict) else {}), schema)
    return found


def parsers() -> dict[str, Any]:
    """Every command and subcommand with its parser."""
    found = {}
    for name, parser in build_parser()._subparsers._group_actions[0].choices.items():  # type: ignore[union-attr]  # argparse has no public way
        found[name] = parser
        for group in parser._subparsers._group_actions if parser._subparsers else ():
            found.update({f"{name} {verb}": inner for verb, inner in group.choices.items()})
    return found


@pytest.mark.parametrize(("name", "parser"), parsers().items(), ids=list(parsers()))
def test_every_help_text_is_for_users(name: str, parser: Any) -> None:
    """It says what the command does, in words that need no knowledge of the code, and explains every argument."""
    assert parser.description
    assert not re.search(r"docstring|parsing lives|modules of their own|__\w+__", parser.description, re.I)
    if name != "env":  # its argument is one of the subcommands, which explain themselves
        assert [action.dest for action in parser._actions if not action.help] == []
