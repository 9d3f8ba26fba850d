"""What every table of a configuration file is: closed, unchangeable, and strict about numbers."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Entries = Annotated[
    list[str],
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | list[str]
    ),
]
"""A list of texts; a single one may stand alone."""


class Truthless(BaseModel):
    """Takes no true or false where a number is meant, and no empty text where a path is; to Python they are 1, 0 and the working directory."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_lookalikes(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name] if info.field_name else None
        if isinstance(value, bool) and field is not None and _is_number(field.annotation):
            raise PydanticCustomError("not_a_number", "Input should be a number")
        if isinstance(value, str) and not value and field is not None and _is_path(field.annotation):
            raise PydanticCustomError("no_path", 'Is empty; a path is meant ("." is the working directory)')
        return value


def _is_number(annotation: Any) -> bool:
    parts = (annotation, *getattr(annotation, "__args__", ()))
    return bool not in parts and (int in parts or float in parts or any(map(_is_number, parts[1:])))


def _is_path(annotation: Any) -> bool:
    return annotation is Path or Path in getattr(annotation, "__args__", ())


class Section(Truthless):
    """A TOML table: unknown keys are errors, values never change, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
