"""What importing brings along: environments need few libraries, and importing costs little.

Which room may import which is checked by import-linter (pyproject.toml, `make check`). What a module imports is read
from its source, imports inside functions included; the costs are seen in a fresh interpreter.
"""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import orchestrator

ROOT = Path(__file__).parent.parent
ALLOWED_IN_ENVS = {"aiohappyeyeballs", "aiohttp", "msgspec", "numpy", "structlog", "uvloop", "yarl", "zmq"}
"""aiohappyeyeballs and yarl come with aiohttp; uvloop is used where it is there."""

LIBRARIES_OF_ADAPTERS = {
    "atroposlib",
    "datasets",
    "inspect_ai",
    "math_verify",
    "openai",
    "reasoning_gym",
    "transformers",
    "verifiers",
}

LIBRARIES_OF_TRACKERS = {"tensorboard", "wandb"}


def modules(*packages: str) -> dict[str, Path]:
    """Every module of the packages, by its name."""
    found = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Every module that a file imports anywhere in it; `from a import b` counts as a.b where that is a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


KNOWN = modules("orchestrator", "envs")
ARROWS = {name: set(imported(path, KNOWN)) for name, path in KNOWN.items()}


LIBRARIES = (
    {name.split(".")[0] for names in ARROWS.values() for name in names}
    - set(sys.stdlib_module_names)
    - {"envs", "orchestrator"}
    - LIBRARIES_OF_ADAPTERS
    - LIBRARIES_OF_TRACKERS
)
"""What the two packages import from elsewhere, by the names under which it is imported."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def distribution(requirement: str) -> str:
    """The name in a requirement or of an installed distribution, spelled in one way."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_what_is_imported_is_declared() -> None:
    """A library that merely comes along with another one may go with its next release; none is declared in vain."""
    installed = importlib.metadata.packages_distributions()
    needed = {distribution(installed[library][0]) for library in LIBRARIES}
    assert needed == {distribution(requirement) for requirement in PROJECT["dependencies"]}


def test_what_is_declared_is_pinned() -> None:
    """A fresh checkout installs the versions that were tested, tools included."""
    pins = {
        distribution(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"
    }
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    assert {distribution(requirement) for requirement in wanted} <= pins


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys; before = set(sys.modules); {statement}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", [name for name in KNOWN if name.split(".")[0] == "envs"])
def test_envs_never_imports_the_service(module: str) -> None:
    """An env server may run under an interpreter that has only `envs` and a few light libraries."""
    roots = {name.split(".")[0] for name in ARROWS[module]} - set(sys.stdlib_module_names) - {"envs"}
    allowed = ALLOWED_IN_ENVS | (LIBRARIES_OF_ADAPTERS if module.startswith("envs.adapters.") else set())
    assert roots <= allowed


HEAVY = {
    "aiohttp",
    "asyncio",
    "numpy",
    "pydantic",
    "rich",
    "uvloop",
    "zmq",
}


def test_importing_the_package_loads_nothing_heavy() -> None:
    """`import orchestrator` starts nothing and costs next to nothing."""
    assert loaded_by("import orchestrator, orchestrator.cli") & HEAVY == set()


def test_the_command_line_tells_what_there_is_without_loading_it() -> None:
    """`orchestrator --help`, and the help of a command, wait for no library."""
    for asked in (["--help"], ["run", "--help"], ["env", "try", "--help"]):
        loaded = loaded_by(
            "import contextlib, io; from orchestrator.cli import main\n"
            "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
            f"    main({asked!r})\n"
        )
        assert "orchestrator.cli.run" in loaded
        assert (
            loaded & {*HEAVY, "msgspec", "structlog", "http", "ssl", "envs", "orchestrator.config"} == set()
        )


def test_what_programs_call_is_imported_when_it_is_asked_for() -> None:
    """Every name that the package lists is there, and none of them costs anything before."""
    assert set(orchestrator.__all__) <= set(dir(orchestrator))
    for name in orchestrator.__all__:
        assert getattr(orchestrator, name) is not None
    assert loaded_by("import orchestrator; dir(orchestrator)") & HEAVY == set()
    assert {"aiohttp", "zmq"} <= loaded_by("from orchestrator import running, rollouts")
    with pytest.raises(AttributeError, match="has no attribute 'runing'"):
        _ = orchestrator.runing


def test_a_trainer_imports_little() -> None:
    """What a trainer imports brings only what its link needs: pyzmq, msgspec, numpy."""
    loaded = loaded_by("import orchestrator.trainer")
    assert loaded & (HEAVY - {"numpy", "zmq"}) == set()
    roots = {name.split(".")[0] for name in loaded}
    assert roots & {"aiohttp", "pydantic_settings", "rich", "structlog", "uvloop"} == set()


def test_the_sdk_imports_little() -> None:
    """`from envs import Environment` brings neither the HTTP client nor the server."""
    assert loaded_by("import envs") & (HEAVY - {"asyncio", "numpy"}) == set()


def test_importing_any_module_starts_no_thread() -> None:
    """No module does anything when it is imported: none of ours leaves a thread or an event loop behind."""
    of_extras = {f"orchestrator.track.{library}" for library in LIBRARIES_OF_TRACKERS}
    of_extras.add("orchestrator.trainer.torch_dataset")
    names = [
        name
        for name in KNOWN
        if not name.startswith("envs.adapters.") and not name.endswith("__main__") and name not in of_extras
    ]
    statement = f"import importlib, threading; [importlib.import_module(name) for name in {names!r}]"
    check = f"{statement}; assert threading.active_count() == 1, threading.enumerate()"
    loaded_by(check)
