"""Which domain an env counts towards.

The domain of an env is what stands before `::` in its ids, where a [domains.NAME] table has that name and all of its ids
agree; any other env is a domain of its own, under its own name. Raw data may be of the wrong type here, as in all
checks; validation reports that.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def domain_of(name: str, ids: Sequence[str], domains: Collection[str]) -> str:
    """The domain of an env; `domains` are the names of the [domains.NAME] tables."""
    heads = {text.strip().partition("::")[0] if "::" in text else "" for text in ids}
    head = heads.pop() if len(heads) == 1 else ""
    return head if head in domains else name


def raw_domain_of(env: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The same for an env of a file that is not validated yet; empty where the env has neither name nor id."""
    found = env.get("id")
    ids = [text for text in (found if isinstance(found, list) else [found]) if isinstance(text, str)]
    name = env.get("name") or " + ".join(ids)
    return domain_of(name if isinstance(name, str) else "", ids, _table(data, "domains"))


def raw_targets(data: Mapping[str, Any]) -> dict[str, float]:
    """The targets of [mix.domains] that are numbers; empty where envs are weighed against each other directly."""
    return {
        name: float(target)
        for name, target in _table(_table(data, "mix"), "domains").items()
        if isinstance(target, (int, float)) and not isinstance(target, bool) and 0 < target < math.inf
    }


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}
