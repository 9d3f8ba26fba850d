"""What a buffer may be told: every mistake is a ValueError that names the option and its value."""

from collections.abc import Collection, Mapping
from fractions import Fraction
from operator import index

_CHOICES = {
    "unit": ("sequences", "tokens"),
    "on_starved": ("redistribute", "wait"),
    "on_stuck": ("wait", "split"),
    "order": ("arrival", "version"),
}


def check_options(
    *,
    stuck_after_s: float,
    can_split: bool,
    targets: Mapping[str, float] | None,
    quotas: Mapping[str, float] | None,
    minimums: Mapping[str, float | Fraction] | None,
    envs: Collection[str] | None,
    **chosen: str,
) -> None:
    """Refuse what does not go together."""
    for what, value in chosen.items():
        if value not in _CHOICES[what]:
            raise ValueError(f"{what} must be one of {', '.join(_CHOICES[what])}, not {value!r}")
    splits = chosen["on_stuck"] == "split"
    if chosen["unit"] == "tokens" and (quotas or splits):
        raise ValueError("quotas and splitting need unit = sequences: a token budget is not filled exactly")
    if quotas and minimums:
        raise ValueError("quotas and minimums exclude each other: a quota is exact")
    if targets and (quotas or chosen["unit"] == "tokens"):
        raise ValueError("targets need unit = sequences and no quotas, which are exact")
    if splits and not can_split:
        raise ValueError("on_stuck = split needs a function that splits a group")
    if not stuck_after_s >= 0:
        raise ValueError(f"stuck_after_s must not be negative, not {stuck_after_s!r}")
    for what, shares in (("quotas", quotas), ("targets", targets)):
        if shares and envs is not None and set(envs) != set(shares):
            raise ValueError(f"{what} must name every env: {sorted(set(envs) ^ set(shares))} are in one only")


def whole(what: str, value: object, *, least: int | None = None) -> int:
    """The value as an int, or a ValueError that names it."""
    try:
        number = index(value)  # type: ignore[arg-type]  # whether it is one is what is asked
    except TypeError:
        raise ValueError(f"{what} must be a whole number, not {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{what} must be at least {least}, not {value!r}")
    return number
