"""The reply must be JSON of a given schema; validated with jsonschema, an extra."""

import importlib
import json
import re
from collections.abc import Mapping
from typing import Any

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

    def __init__(self, schema: dict[str, Any] | None = None, column: str = "") -> None:
        if (schema is None) == (not column):
            raise ValueError("give either schema or column")
        self._library = _jsonschema()
        self._column = column
        self._shared = self._validator(schema) if schema is not None else None
        self.columns = [column] if column else []

    def check(self, row: Row) -> str:
        if self._shared is None:
            try:
                self._validator(find(row, self._column))
            except ValueError as error:
                return f'column "{self._column}": {error}'
        return ""

    async def score(self, reply: str, row: Row) -> Score:
        fenced = _FENCED.findall(reply)
        text = (fenced[-1] if fenced else reply).strip()
        if not text:
            return NO_ANSWER
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return Score(0.0, metrics={"parsed": 0.0})
        validator = self._shared or self._validator(find(row, self._column))
        return Score(float(validator.is_valid(value)), metrics={"parsed": 1.0})

    def _validator(self, schema: Any) -> Any:
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise ValueError(f"the schema is not JSON: {error}") from None
        if not isinstance(schema, (Mapping, bool)):
            raise ValueError(f"a schema is a table, not a {type(schema).__name__}")
        kind = self._library.validators.validator_for(schema, default=self._library.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except self._library.SchemaError as error:
            raise ValueError(f"not a JSON schema: {error.message}") from None
        return kind(schema)


def _jsonschema() -> Any:
    try:
        return importlib.import_module("jsonschema")
    except ModuleNotFoundError:
        raise EnvironmentLoadError(f"jsonschema is not installed for this interpreter; {INSTALL}") from None
