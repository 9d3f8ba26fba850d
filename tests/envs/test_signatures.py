"""What a function takes: the schema that is told of it, and the arguments that it accepts."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from envs.signatures import ArgumentsError, Signature, SignatureError, described_parameters


@dataclass
class Point:
    """A place."""

    x: int
    y: int = 0


def book(
    city: str,
    nights: Annotated[int, "how many nights"],
    kind: Literal["single", "double"] = "single",
    extras: list[str] = [],  # noqa: B006  what a user may write
    at: Point | None = None,
    note: Any = None,
) -> None:
    """Book a room."""


def test_type_hints_become_a_json_schema() -> None:
    """Required and optional parameters, choices, descriptions, and classes beside it."""
    schema = Signature(book).schema
    assert schema["required"] == ["city", "nights"]
    assert schema["properties"]["city"] == {"type": "string"}
    assert schema["properties"]["nights"] == {"type": "integer", "description": "how many nights"}
    assert schema["properties"]["kind"]["enum"] == ["double", "single"]
    assert schema["properties"]["extras"]["items"] == {"type": "string"}
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Point"]["required"] == ["x"]


def test_arguments_are_read_as_the_hints_say() -> None:
    """Text is JSON, and an object becomes the class that the hint names."""
    signature = Signature(book)
    read = signature.read('{"city": "Rome", "nights": 2, "at": {"x": 1}}')
    assert read == {"city": "Rome", "nights": 2, "at": Point(1, 0)}
    assert signature.read({"city": "Rome", "nights": "2"}, strict=False)["nights"] == 2
    assert Signature(lambda: None).read("") == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('{"city": "Rome"}', "missing required field `nights`"),
        ('{"city": "Rome", "nights": "two"}', "Expected `int`, got `str` - at `nights`"),
        ('{"city": "Rome", "nights": 1, "pets": 2}', "contains unknown field `pets`"),
        ('{"city": "Rome", "nights": 1, "kind": "suite"}', "Invalid enum value 'suite'"),
        ('{"city": ', "truncated"),
        ("[1]", "Expected `object`, got `array`"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(arguments: str, says: str) -> None:
    """It names the parameter and what was expected."""
    with pytest.raises(ArgumentsError) as caught:
        Signature(book).read(arguments)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parameters_without_a_name_cannot_be_described() -> None:
    """The message names the function."""

    def gather(*numbers: int) -> None: ...

    with pytest.raises(SignatureError, match="gather: \\*numbers"):
        Signature(gather)


def test_a_docstring_describes_its_parameters() -> None:
    """Google's style: an "Args:" section, with lines that go on; other sections are left out."""
    text, parameters = described_parameters(
        """Look something up.

        In a large book.

        Args:
            word: what to look up,
                in lower case
            page (int): where to begin

        Returns:
            the entry
        """
    )
    assert text == "Look something up.\n\nIn a large book."
    assert parameters == {"word": "what to look up, in lower case", "page": "where to begin"}
    assert described_parameters("Plain.") == ("Plain.", {})
