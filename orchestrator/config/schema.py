"""The JSON Schema of a configuration file, for editors that complete and check TOML.

Made from the same classes as the validation, with the fields' docstrings as descriptions. It knows shapes and ranges;
what relates fields to each other only `orchestrator check` knows. Written for TOML: there is no null, and a setting
that may be unset is simply left out.
"""

import json
from typing import Any

from orchestrator.config import Config


def render_schema() -> str:
    """The schema as text, the same in every process."""
    schema = _for_toml(Config.model_json_schema())
    breaker = schema["$defs"]["MixConfig"]["properties"]["breaker"]
    # `breaker = false` is short for a table; the validator that takes it is unknown to the schema.
    schema["$defs"]["MixConfig"]["properties"]["breaker"] = {"anyOf": [breaker, {"type": "boolean"}]}
    head = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of the rollout orchestrator",
    }
    return json.dumps(head | schema, indent=2, ensure_ascii=False) + "\n"


def _for_toml(node: Any) -> Any:
    """Without titles, which repeat the keys, without null, and without the defaults of whole tables."""
    if isinstance(node, list):
        return [_for_toml(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: _for_toml(value) for key, value in node.items() if key != "title" or isinstance(value, dict)}
    if isinstance(made.get("description"), str):
        made["description"] = " ".join(made["description"].split())
    if made.get("default", 0) is None or "$ref" in made:
        made.pop("default", None)
    choices = [choice for choice in made.pop("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        made = choices[0] | made
    elif choices:
        made["anyOf"] = choices
    return made
