"""Partial credit for an answer, shared by the environments here."""


def overlap(text: str, wanted: str) -> float:
    """Share of the characters that are right and in their place; 1.0 only for exactly what is wanted."""
    return sum(a == b for a, b in zip(text, wanted, strict=False)) / max(len(text), len(wanted))
