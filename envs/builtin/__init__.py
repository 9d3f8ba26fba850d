"""Environments that come with the project: each is learned by the small local policy and shows one kind.

`BUILTIN` is the table that the loader reads; nothing is imported until it is asked for.
"""

from typing import NamedTuple


class BuiltinEnvironment(NamedTuple):
    """Where an environment is ("module:Class") and what it is, in one line."""

    target: str
    description: str


BUILTIN = {
    "reverse": BuiltinEnvironment(
        "envs.builtin.reverse:Reverse", "write a word backwards; one turn, instant"
    ),
    "larger": BuiltinEnvironment(
        "envs.builtin.larger:Larger", "name the larger of two digits; one turn, 20 ms"
    ),
    "agree": BuiltinEnvironment(
        "envs.builtin.agree:Agree", "pick the letter that the rest of the group picks; group-scored, 50 ms"
    ),
    "duel": BuiltinEnvironment(
        "envs.builtin.duel:Duel",
        "be right where the other seat is wrong; two seats with rewards of their own",
    ),
    "lookup": BuiltinEnvironment(
        "envs.builtin.lookup:Lookup",
        "ask a tool for a value and pass it on; two turns, a slow tool of 200 ms",
    ),
    "calculator": BuiltinEnvironment(
        "envs.builtin.calculator:Calculator",
        "work out a sum, with a calculator as a tool; a tool loop, instant",
    ),
}
"""Name → environment, for ids of the form `builtin::<name>`."""
