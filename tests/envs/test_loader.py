"""From an id to an environment: every form that is allowed, and one clear line for every mistake."""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envs import Environment, EnvironmentLoadError, Model, Rollout, Task
from envs.builtin import BUILTIN
from envs.errors import EnvironmentRaisedError
from envs.importing import nearest
from envs.loader import LOADERS, EnvironmentId, find_loader, load_environment, parse_id


class Plain(Environment):
    """Takes two arguments."""

    def __init__(self, size: int = 1, label: str = "") -> None:
        self.size = size
        self.label = label

    def tasks(self, split: str) -> list[Task]:
        return [{}] * self.size

    async def rollout(self, task: Task, model: Model) -> Rollout:
        return model.rollout(reward=0.0)


class Unfinished(Environment):
    """Forgot its rollout."""

    def tasks(self, split: str) -> list[Task]:
        return []


class Broken(Plain):
    """Raises a TypeError of its own."""

    def __init__(self) -> None:
        raise TypeError("inside the constructor")


def make_plain(size: int) -> Environment:
    return Plain(size, "made")


def make_nothing() -> object:
    return object()


class Family:
    """A loader of one's own."""

    def names(self) -> list[str]:
        return ["one"]

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        return Plain(label=name, **args)


FAMILY = Family()
NOT_A_LOADER = 3
HERE = "tests.envs.test_loader"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("reverse", EnvironmentId("builtin", "reverse")),
        ("builtin::reverse", EnvironmentId("builtin", "reverse")),
        ("builtin::reverse@eval", EnvironmentId("builtin", "reverse", "eval")),
        ("reverse@eval", EnvironmentId("builtin", "reverse", "eval")),
        ("reasoning_gym::gsm_symbolic", EnvironmentId("reasoning_gym", "gsm_symbolic")),
        ("verifiers::org/env-name@test", EnvironmentId("verifiers", "org/env-name", "test")),
        ("pkg.module:Class", EnvironmentId("", "pkg.module:Class")),
        ("pkg.module:Class@eval", EnvironmentId("", "pkg.module:Class", "eval")),
        ("pkg.module:LOADER::thing", EnvironmentId("pkg.module:LOADER", "thing")),
        (" reverse ", EnvironmentId("builtin", "reverse")),
    ],
)
def test_an_id_has_a_loader_a_name_and_maybe_a_split(text: str, parts: EnvironmentId) -> None:
    """All the forms that the configuration accepts."""
    assert parse_id(text) == parts


@pytest.mark.parametrize(
    "text", ["", " ", "::", "builtin::", "::reverse", "reverse@", "@eval", "builtin:: reverse"]
)
def test_what_is_no_id_is_refused(text: str) -> None:
    """The mistake is quoted."""
    with pytest.raises(EnvironmentLoadError, match="environment id"):
        parse_id(text)


@pytest.mark.parametrize("name", list(BUILTIN))
def test_every_built_in_loads_by_both_of_its_names(name: str) -> None:
    """Plain and with its loader; both splits have tasks."""
    for text in (name, f"builtin::{name}@eval"):
        environment = load_environment(text)
        assert environment.tasks("train")[0]
        assert environment.tasks("eval")[0]


def test_a_class_is_made_with_its_args() -> None:
    """ "module:Class" with the configuration's `args`."""
    environment = load_environment(f"{HERE}:Plain@eval", {"size": 3, "label": "x"})
    assert isinstance(environment, Plain)
    assert (environment.size, environment.label) == (3, "x")


def test_a_function_that_returns_an_environment_will_do() -> None:
    """For environments that are put together rather than subclassed."""
    environment = load_environment(f"{HERE}:make_plain", {"size": 2})
    assert isinstance(environment, Plain)
    assert environment.label == "made"


def test_a_loader_can_be_added_to_the_table_or_named_in_the_id() -> None:
    """Adapters are entries of a table; a user's own needs none."""
    by_table = load_environment("mine::one", {"size": 2}, loaders={**LOADERS, "mine": f"{HERE}:FAMILY"})
    by_reference = load_environment(f"{HERE}:FAMILY::two")
    assert isinstance(by_table, Plain)
    assert isinstance(by_reference, Plain)
    assert (by_table.label, by_reference.label) == ("one", "two")


@pytest.mark.parametrize("name", list(LOADERS))
def test_every_loader_of_the_table_lists_its_environments_or_says_how_to_install_them(name: str) -> None:
    """Importing a loader needs none of the libraries that it adapts."""
    said = ""
    names: list[str] = []
    try:
        names = list(find_loader(name).names())
    except EnvironmentLoadError as error:
        said = str(error)
    assert names == sorted(set(names))
    assert names or "install" in said


@pytest.mark.parametrize(
    ("text", "args", "says"),
    [
        ("revers", {}, 'no built-in environment "revers"; did you mean "reverse"?'),
        ("qqqq", {}, "there are: agree"),
        ("bultin::reverse", {}, 'no loader "bultin"; did you mean "builtin"?'),
        ("nowhere_at_all:Class", {}, "no module nowhere_at_all"),
        (f"{HERE}.deeper:Class", {}, "no module tests.envs.test_loader.deeper"),
        (f"{HERE}:Plane", {}, 'has no "Plane"; did you mean "Plain"?'),
        (f"{HERE}:", {}, "is not module:attribute"),
        ("./spelling:Spelling", {}, "is not module:attribute"),
        (f"{HERE}:HERE", {}, "is a str, not an Environment class"),
        (f"{HERE}:Family", {}, "not a subclass of envs.Environment"),
        (f"{HERE}:Unfinished", {}, "does not define rollout"),
        (f"{HERE}:make_nothing", {}, "returned a object, not an Environment"),
        (f"{HERE}:Plain", {"sise": 3}, "'sise'; it takes size, label"),
        (f"{HERE}:make_plain", {}, "'size'; it takes size"),
        (f"{HERE}:NOT_A_LOADER::x", {}, "has no load(name, args)"),
        ("reverse", {"lenth": 3}, 'args of "reverse" do not fit'),
    ],
)
def test_a_mistake_is_one_line_that_names_the_nearest_names(
    text: str, args: dict[str, Any], says: str
) -> None:
    """Wrong loader, environment, module, attribute, kind of object or arguments."""
    with pytest.raises(EnvironmentLoadError) as caught:
        load_environment(text, args)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_constructor_that_raises_keeps_its_own_exception() -> None:
    """The author needs the place and the traceback, not a sentence about arguments."""
    with pytest.raises(
        EnvironmentRaisedError, match=r"the constructor of .* raised TypeError: inside the constructor"
    ) as caught:
        load_environment(f"{HERE}:Broken")
    assert isinstance(caught.value.__cause__, TypeError)
    assert "test_loader.py" in str(caught.value)
    assert str(caught.value).endswith(" in __init__")
    assert 'raise TypeError("inside the constructor")' in caught.value.traceback
    assert "envs/loader.py" not in caught.value.traceback


def test_an_import_that_raises_says_so_with_the_authors_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the line is in another file of the author's, or no line ran at all."""
    (tmp_path / "raising_helper.py").write_text("import json\n\njson.loads('{')\n")
    (tmp_path / "raising_envs.py").write_text("import raising_helper\n")
    (tmp_path / "misspelt_envs.py").write_text("class Mine(\n")
    (tmp_path / "exiting_envs.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(EnvironmentRaisedError) as caught:
        load_environment("raising_envs:Mine")
    assert 'importing environment "raising_envs:Mine" raised JSONDecodeError: ' in str(caught.value)
    assert str(caught.value).endswith(", at raising_helper.py:3 in <module>")
    assert "importlib" not in caught.value.traceback
    with pytest.raises(EnvironmentRaisedError, match=r"raised SyntaxError: .*, at misspelt_envs\.py:1"):
        load_environment("misspelt_envs:Mine")
    with pytest.raises(EnvironmentRaisedError, match=r"raised SystemExit: 3, at exiting_envs\.py:1"):
        load_environment("exiting_envs:Mine")


class RollsAtOnce(Plain):
    """Forgot "async"."""

    def rollout(self, task: Task, model: Model) -> Rollout:  # type: ignore[override]
        raise AssertionError("it is refused before anybody calls it")


class ScoresAtOnce(Plain):
    """The same in another method."""

    def score_group(self, task: Task, rollouts: list[Rollout]) -> list[float]:  # type: ignore[override]
        return []


class YieldingRollout(Plain):
    """Takes a rollout for a generator."""

    async def rollout(self, task: Task, model: Model) -> Any:
        yield None


class AsyncTasks(Plain):
    """One "async" too many."""

    async def tasks(self, split: str) -> list[Task]:  # type: ignore[override]
        return []


def _passed_on(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Decorated(Plain):
    """A decorator that hands on what the method returns."""

    rollout = _passed_on(Plain.rollout)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("RollsAtOnce", 'is a plain function; write "async def rollout"'),
        ("ScoresAtOnce", 'is a plain function; write "async def score_group"'),
        ("YieldingRollout", "yields; it must return its result instead"),
        ("AsyncTasks", 'is async; write "def tasks"'),
    ],
)
def test_a_method_that_is_async_where_it_must_not_be_is_named(name: str, says: str) -> None:
    """With its file and line, before anything runs."""
    with pytest.raises(EnvironmentLoadError) as caught:
        load_environment(f"{HERE}:{name}", {"size": 1})
    assert says in str(caught.value)
    assert "test_loader.py:" in str(caught.value)


def test_a_decorated_method_is_taken_for_what_it_wraps() -> None:
    """It is called like any other."""
    assert isinstance(load_environment(f"{HERE}:Decorated", {"size": 1}), Decorated)


def test_a_missing_dependency_is_told_apart_from_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is there; what it imports is not installed for this interpreter."""
    (tmp_path / "needs_more_envs.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with pytest.raises(
        EnvironmentLoadError, match='needs "not_installed_anywhere", which is not installed'
    ) as caught:
        load_environment("needs_more_envs:Class")
    assert sys.executable in str(caught.value)


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a console script has no working directory on its path, the loader adds it."""
    (tmp_path / "envs_of_mine_here.py").write_text(f"from {HERE} import Plain as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert isinstance(load_environment("envs_of_mine_here:Mine"), Plain)


def test_nearest_lists_everything_when_nothing_is_close() -> None:
    """And says so when there is nothing."""
    assert nearest("zzz", ["b", "a"]) == "there are: a, b"
    assert nearest("zzz", []) == "there are none"
