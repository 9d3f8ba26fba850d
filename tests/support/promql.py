"""As much of PromQL as is needed to see which metrics and labels an expression uses."""

import re

KEYWORDS = frozenset(
    {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset"}
)
OF_PROMETHEUS = frozenset({"job", "instance"})
"""Labels that every scraped series has."""


def metrics_and_labels(expression: str) -> dict[str, set[str]]:
    """Each metric with the labels that it is selected by."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression)
    found: dict[str, set[str]] = {}
    for name, matchers in re.findall(
        r"\b([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?(?!\s*[\w(:])", _without_lists(text)
    ):
        if name not in KEYWORDS:
            found.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    return found


def grouped_by(expression: str) -> set[str]:
    """The labels in lists: of aggregations and of matching."""
    lists = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expression)
    return {label.strip() for found in lists for label in found.split(",")} - {""}


def _without_lists(text: str) -> str:
    """Without label lists, durations in brackets and plain numbers, none of which are metrics."""
    text = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    return re.sub(r"\[[^\]]*\]", " ", text)


def matched_values(expression: str) -> list[tuple[str, set[str]]]:
    """Labels with the values that they are to have, where these are spelled out."""
    found = re.findall(r'(\w+)\s*=~?\s*"([\w|]+)"', expression)
    return [(label, set(values.split("|"))) for label, values in found]
