"""Which generation of verifiers serves an environment."""

import contextlib
import importlib.util
from types import ModuleType
from typing import Any

import pytest

from envs.adapters.reward_errors import watch, watching
from envs.adapters.verifiers import generation_of, installed_version
from envs.errors import EnvironmentLoadError
from envs.loader import find_loader


def module(**attributes: Any) -> ModuleType:
    """An environment's module."""
    made = ModuleType("tested")
    vars(made).update(attributes)
    return made


CLASSIC = module(load_environment=lambda: None)
TASKSET = module(__all__=["Words"], Words=object)


def test_the_generation_follows_the_installed_release_and_the_environment() -> None:
    """Releases up to 0.3 load classic environments, 0.4 loads tasksets."""
    assert generation_of(CLASSIC, "x", (0, 3, 1)) == "classic"
    assert generation_of(TASKSET, "x", (0, 4, 0)) == "v1"


@pytest.mark.parametrize(
    ("environment", "version", "said"),
    [
        (CLASSIC, (0, 4, 0), r"is a classic environment.*0\.4\.0.*verifiers-legacy.*`python`"),
        (TASKSET, (0, 3, 1), r"if it is a v1 taskset.*\[verifiers\].*`python`.*0\.3\.1"),
        (CLASSIC, (0, 1, 3), r"0\.1\.3 is too old"),
    ],
)
def test_the_wrong_generation_is_an_error_that_says_what_to_install(
    environment: ModuleType, version: tuple[int, ...], said: str
) -> None:
    """The two cannot share a virtualenv, so the message names the other one and the setting."""
    with pytest.raises(EnvironmentLoadError, match=said):
        generation_of(environment, "x", version)


@pytest.mark.parametrize(
    ("loader", "library"), [("verifiers", "verifiers"), ("reasoning_gym", "reasoning-gym")]
)
def test_a_library_that_is_not_installed_is_an_error_with_the_install_line(loader: str, library: str) -> None:
    """Listing and loading say the same, so that `env list` can show it."""
    _skip_where_installed(loader)
    for use in (lambda: find_loader(loader).names(), lambda: find_loader(loader).load("x", {})):
        with pytest.raises(
            EnvironmentLoadError, match=rf"{library} is not installed.*pip install.*{library}"
        ):
            use()


def test_the_version_of_a_library_that_is_not_there_is_an_error() -> None:
    """Nothing is guessed."""
    _skip_where_installed("verifiers")
    with pytest.raises(EnvironmentLoadError, match="is not installed"):
        installed_version()


def _skip_where_installed(package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed for this interpreter")


class FakeRubric:
    """As much of a rubric as is looked at: functions with weights, which it scores zero when they raise."""

    def __init__(self, *functions: Any) -> None:
        self.funcs = list(functions)
        self.weights = [1.0] * len(functions)

    def score(self) -> None:
        for function in self.funcs:
            with contextlib.suppress(LookupError):
                function()


def test_an_error_in_a_reward_function_is_noted_once_however_often_it_is_wrapped() -> None:
    """Looking again at a rubric wraps only what is new."""

    def raises() -> float:
        raise LookupError("gone")

    rubric = FakeRubric(raises)
    for _ in range(3):
        watch(rubric, is_group=lambda function: False)
    with watching() as errors:
        rubric.score()
    assert [(error.name, error.weight, str(error.error)) for error in errors] == [("raises", 1.0, "gone")]


def test_errors_outside_of_a_watch_are_nobodys() -> None:
    """The wrapped function still raises, and the next watch starts empty."""

    def raises() -> float:
        raise LookupError("gone")

    rubric = FakeRubric(raises)
    watch(rubric, is_group=lambda function: False)
    rubric.score()
    with watching() as errors:
        pass
    assert errors == []
