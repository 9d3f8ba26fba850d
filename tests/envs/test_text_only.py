"""Only text is shown to a policy."""

from typing import Any

import pytest

from envs.adapters.openenv_actions import observation_text
from envs.errors import RolloutFailure


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("data:image/png;base64,iVBORw0KGgo=", "image as a data URL"),
        ({"shown": ["DATA:audio/wav;base64,UklGRg=="]}, "audio as a data URL"),
        ([[[0, 127, 255]] * 32] * 32, "3072 numbers"),
        ([0.5] * 1024, "1024 numbers"),
    ],
)
def test_a_picture_in_an_observation_is_refused_with_the_name_of_its_field(value: Any, found: str) -> None:
    """As text it would be thousands of tokens that nobody can read; with other fields named, it is not shown."""
    observation = {"board": "x.o", "screen": value}
    with pytest.raises(RolloutFailure, match=found) as caught:
        observation_text(observation, None)
    assert (caught.value.kind, caught.value.retryable) == ("not_text", False)
    assert '"screen"' in caught.value.message
    assert "args.observation" in caught.value.message
    assert observation_text(observation, ["board"]) == "x.o"


@pytest.mark.parametrize(
    "value", [list(range(1023)), ["a"] * 5000, "data:text/plain,hello", [1] * 5000 + ["a"]]
)
def test_what_people_can_read_is_shown(value: Any) -> None:
    """Short lists of numbers, long ones of words, other text."""
    assert observation_text({"board": value}, None)


def test_a_picture_that_a_tool_returns_is_refused() -> None:
    """Its texts alone would be half of what the tool said."""
    observation = {"tool_name": "look", "result": {"content": [{"type": "image", "data": "iVBORw0KGgo="}]}}
    with pytest.raises(RolloutFailure, match="part of type image"):
        observation_text(observation, None)
