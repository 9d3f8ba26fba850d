"""The reply must be JSON of a given schema; validated with jsonschema, an extra.

A schema may hold regular expressions, and a reply much to compare, so that replies are validated aside.
"""

import importlib
import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from envs.dataset.aside import Aside
from envs.dataset.rows import Row
from envs.dataset.scoring import NO_ANSWER, Score, Scorer
from envs.dataset.template import find
from envs.errors import EnvironmentLoadError

INSTALL = "pip install 'rollout-orchestrator[json-schema]'"
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


class JsonSchema(Scorer):
    """One `schema` for all rows, or a `column` with each row's own, as a table or as text.

    The reply's last fenced block counts, else the whole reply. The metric `parsed` is 1 where it is JSON at all.
    """

    def __init__(
        self, schema: dict[str, Any] | None = None, column: str = "", timeout_s: float = 5.0
    ) -> None:
        if (schema is None) == (not column):
            raise ValueError("give either schema or column")
        _jsonschema()
        if schema is not None:
            _validator(schema)
        self._column = column
        self._shared = schema
        self._aside = Aside(
            "envs.dataset.json_schema:is_valid", most=os.cpu_count() or 1, timeout_s=timeout_s
        )
        self.columns = [column] if column else []

    def check(self, row: Row) -> str:
        if self._shared is None:
            try:
                _validator(_read(find(row, self._column)))
            except ValueError as error:
                return f'column "{self._column}": {error}'
        return ""

    async def score(self, reply: str, row: Row) -> Score:
        fenced = _FENCED.findall(reply)
        text = (fenced[-1] if fenced else reply).strip()
        if not text:
            return NO_ANSWER
        schema = self._shared if self._shared is not None else _read(find(row, self._column))
        try:
            valid = await self._aside.call(json.dumps(schema), text)
        except TimeoutError:
            return Score(0.0, metrics={"parsed": 1.0, "timed_out": 1.0})
        return Score(float(bool(valid)), metrics={"parsed": float(valid is not None), "timed_out": 0.0})

    async def close(self) -> None:
        await self._aside.aclose()


def is_valid(schema: str, text: str) -> bool | None:
    """Whether a text is of a schema, which is JSON too; None where it is no JSON at all. Runs aside."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return bool(_read_validator(schema).is_valid(value))


@lru_cache(maxsize=256)
def _read_validator(schema: str) -> Any:
    return _validator(json.loads(schema))


def _read(schema: Any) -> Any:
    """A schema that may be JSON in a text."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from None


def _validator(schema: Any) -> Any:
    """What validates; ValueError for what is no schema."""
    if not isinstance(schema, (Mapping, bool)):
        raise ValueError(f"a schema is a table, not a {type(schema).__name__}")
    library = _jsonschema()
    kind = library.validators.validator_for(schema, default=library.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except library.SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from None
    return kind(schema)


def _jsonschema() -> Any:
    try:
        return importlib.import_module("jsonschema")
    except ModuleNotFoundError:
        raise EnvironmentLoadError(f"jsonschema is not installed for this interpreter; {INSTALL}") from None
