"""Classic verifiers environments for the tests: `kind` picks one."""

# Its library is only in a virtualenv of its own.
# mypy: ignore-errors

from typing import Any

import verifiers as vf
from datasets import Dataset

WORDS = ["stone", "river", "cloud", "ember"]


def words(column: str = "question") -> Dataset:
    return Dataset.from_dict(
        {column: [f"Reverse {word}" for word in WORDS], "answer": [w[::-1] for w in WORDS]}
    )


def last_text(completion: Any) -> str:
    return completion[-1].content or ""


def correct(completion: Any, answer: str) -> float:
    return float(last_text(completion) == answer)


async def shout(completion: Any, **kwargs: Any) -> float:
    return float(last_text(completion).isupper())


def raises(completion: Any, answer: str) -> float:
    raise KeyError("no such column")


def nothing(completion: Any) -> Any:
    return None


async def judged(state: Any, completion: Any) -> float:
    """A judge that is the policy itself, asked through the rollout's own client in both ways that there are."""
    said = [vf.UserMessage(content=f"judge {last_text(completion)}")]
    verdict = await state["client"].get_response(said, state["model"], {})
    messages = [{"role": "user", "content": "judge again"}]
    again = await state["client"].client.chat.completions.create(messages=messages, model=state["model"])
    return float(bool(verdict.message.content) and bool(again.choices[0].message.content))


def sampled_tokens(state: Any) -> float:
    """How many tokens the policy sampled, from the trajectory."""
    return float(sum(len(step["tokens"]["completion_ids"]) for step in state["trajectory"]))


def shortest(completions: Any) -> list[float]:
    """Best is who used the fewest characters; it takes the whole group to know."""
    lengths = [len(last_text(completion)) for completion in completions]
    return [float(length == min(lengths)) for length in lengths]


def group_raises(states: Any) -> list[float]:
    raise ValueError("the judge is out")


def single(rubric: vf.Rubric, **options: Any) -> vf.Environment:
    return vf.SingleTurnEnv(dataset=words(), eval_dataset=words().select([1, 2]), rubric=rubric, **options)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Countdown(vf.MultiTurnEnv):
    """Answers each message with how many are left; the conversation ends at none."""

    async def setup_state(self, state: vf.State) -> vf.State:
        state["left"] = 2
        return state

    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        state["left"] -= 1
        return [vf.UserMessage(content=f"{state['left']} left")]

    @vf.stop
    async def out(self, state: vf.State) -> bool:
        return bool(state["left"] == 0)


class Ledger(vf.StatefulToolEnv):
    """A tool that keeps a balance per rollout, which the policy does not pass."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(tools=[], **kwargs)
        self.add_tool(self.deposit, args_to_skip=["account"])

    async def deposit(self, amount: int, account: dict[str, int]) -> str:
        """Put money into the account."""
        account["balance"] += amount
        return f"balance {account['balance']}"

    async def setup_state(self, state: vf.State) -> vf.State:
        state["account"] = {"balance": 100}
        return state

    def update_tool_args(
        self, tool_name: str, tool_args: Any, messages: Any, state: vf.State, **kwargs: Any
    ) -> Any:
        return {**tool_args, "account": state["account"]}


def shorten(text: str) -> str:
    """The first letters of a text."""
    return text[:2]


class TextTools(vf.ToolEnv):
    """For a policy that cannot write tool calls: whatever it says goes to the tool, until the turns are over."""

    async def no_tools_called(self, state: vf.State) -> bool:
        return False

    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        return [await self.call_tool("shorten", {"text": messages[-1].content or ""}, "call_0")]


def variety(completion: Any) -> float:
    """Different characters in the last message; even a policy that has learned nothing differs in it."""
    return float(len(set(last_text(completion))))


kept: set[str] = set()
"""Sandboxes that are open."""


def count_kept() -> int:
    return len(kept)


class KeepingRubric(vf.Rubric):
    """Looks into the sandbox, and closes it when it has scored."""

    @vf.cleanup
    async def close_sandbox(self, state: vf.State) -> None:
        kept.discard(state["trajectory_id"])


class Keeping(Countdown):
    """Leaves its sandbox open for the rubric, unless the rollout is cut off, as the library's own do."""

    async def setup_state(self, state: vf.State) -> vf.State:
        kept.add(state["trajectory_id"])
        return await super().setup_state(state)

    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        if messages[-1].content == "fail":
            raise vf.SandboxError("the box is gone")
        return await super().env_response(messages, state, **kwargs)

    @vf.cleanup
    async def close_sandbox(self, state: vf.State) -> None:
        if not state.get("is_completed"):
            kept.discard(state["trajectory_id"])


class Broken(vf.SingleTurnEnv):
    """Its world fails before the policy is asked."""

    def __init__(self, error: Exception, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._error = error

    async def setup_state(self, state: vf.State) -> vf.State:
        raise self._error


def load_environment(kind: str = "single", extra: float = 1.0) -> vf.Environment:
    exact = vf.Rubric(funcs=[correct, shout], weights=[extra, 0.5])
    balance = vf.Rubric(funcs=[lambda state: float(state["account"]["balance"])])
    match kind:
        case "single":
            return single(exact, system_prompt="You reverse words.")
        case "author_sampling":
            return single(exact, sampling_args={"temperature": 0.1, "top_p": 0.9, "n": 4})
        case "raising_reward":
            return single(vf.Rubric(funcs=[correct, raises]))
        case "reward_of_nothing":
            return single(vf.Rubric(funcs=[correct, nothing]))
        case "raising_metric":
            return single(vf.Rubric(funcs=[correct, raises], weights=[1.0, 0.0]))
        case "group":
            return single(vf.Rubric(funcs=[correct, shortest], weights=[1.0, 2.0]))
        case "judged":
            return single(vf.Rubric(funcs=[correct, judged, sampled_tokens], weights=[1.0, 1.0, 0.0]))
        case "short":
            return Countdown(dataset=words(), rubric=vf.Rubric(funcs=[sampled_tokens]), max_seq_len=extra)
        case "raising_group":
            return single(vf.Rubric(funcs=[correct, group_raises]))
        case "mixture":
            parts = [single(vf.Rubric(funcs=[correct])), single(vf.Rubric(funcs=[shortest]))]
            return vf.EnvGroup(parts, env_names=["plain", "grouped"])
        case "tools":
            return vf.ToolEnv(dataset=words(), tools=[add], rubric=exact, max_turns=4)
        case "text_tools":
            return TextTools(dataset=words(), tools=[shorten], rubric=vf.Rubric(funcs=[variety]), max_turns=3)
        case "stateful":
            return Ledger(dataset=words(), rubric=balance, max_turns=4)
        case "multi_turn":
            return Countdown(dataset=words(), rubric=exact)
        case "keeping":
            return Keeping(dataset=words(), rubric=KeepingRubric(funcs=[correct]))
        case "keeping_group":
            return Keeping(dataset=words(), rubric=KeepingRubric(funcs=[correct, shortest]))
        case "sandbox_error":
            return Broken(vf.SandboxError("the box is gone"), dataset=words(), rubric=exact)
        case "tool_error":
            return Broken(vf.ToolCallError("bad call"), dataset=words(), rubric=exact)
        case "bug":
            return Broken(ZeroDivisionError("oops"), dataset=words(), rubric=exact)
        case "reasoning_gym":
            from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

            return ReasoningGymEnv("chain_sum", num_train_examples=4, num_eval_examples=2)
    raise ValueError(f"no kind {kind}")
