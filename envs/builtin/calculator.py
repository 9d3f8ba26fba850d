"""Work out a sum, with a calculator as a tool: a loop of as many turns as the policy wants.

The shortest way to write an environment with tools. A policy that cannot call tools may still answer by itself.
"""

import ast
import itertools
import operator
from collections.abc import Callable

from envs import Environment, Model, Rollout, Task, chat_with_tools
from envs.builtin._scoring import overlap

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> float:
    """The value of an arithmetic expression of numbers, + - * / and brackets, such as "2 * (3 + 4)"."""
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]  # a number, see above
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"only numbers, + - * / and brackets, not {ast.unparse(node)!r:.60}")


class Calculator(Environment):
    """Sums of two numbers up to `largest`; the policy has `max_turns` turns."""

    def __init__(self, largest: int = 9, max_turns: int = 4) -> None:
        pairs = [pair for pair in itertools.product(range(largest + 1), repeat=2) if sum(pair) <= largest]
        # Both orders of a pair are in the same split, so that the eval split holds sums never trained on.
        self._splits = {
            "train": [pair for pair in pairs if abs(pair[0] - pair[1]) % 4],
            "eval": [pair for pair in pairs if abs(pair[0] - pair[1]) % 4 == 0],
        }
        self._max_turns = max_turns

    def tasks(self, split: str) -> list[Task]:
        return [{"sum": f"{a}+{b}", "value": a + b} for a, b in self._splits[split]]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        asked = f"calculate {task['sum']}"
        chat = await chat_with_tools(model, asked, [calculate], max_turns=self._max_turns)
        reward = overlap(chat.text.strip(), str(task["value"]))
        return model.rollout(reward, metrics=chat.metrics, stop_reason=chat.stop_reason)
