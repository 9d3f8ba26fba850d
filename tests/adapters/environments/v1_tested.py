"""A verifiers v1 taskset for the tests, with a harness that runs in this process instead of a program."""

# Its library is only in a virtualenv of its own.
# mypy: ignore-errors

import json
from typing import Any

import httpx
import verifiers.v1 as vf

WORDS = ["stone", "river", "cloud", "ember"]


class WordData(vf.TaskData):
    answer: str


class WordTaskConfig(vf.TaskConfig):
    raises: bool = False
    sandbox: bool = False


class WordTask(vf.Task[WordData, vf.State, WordTaskConfig]):
    async def setup(self, trace: Any, runtime: Any) -> None:
        if self.config.sandbox:
            raise vf.SandboxError("the box is gone")

    @vf.reward(weight=2.0)
    async def correct(self, trace: Any) -> float:
        if self.config.raises:
            raise KeyError("no such column")
        return float(trace.last_message.content == self.data.answer)

    @vf.metric
    async def length(self, trace: Any) -> float:
        return float(len(trace.last_message.content or ""))


class WordsConfig(vf.TasksetConfig):
    task: WordTaskConfig = WordTaskConfig()
    split: str = "train"
    endless: bool = False


class Words(vf.Taskset[WordTask, WordsConfig]):
    def __init__(self, config: WordsConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self) -> Any:
        words = WORDS if self.config.split == "train" else WORDS[:2]
        place = 0
        while place < len(words) or self.config.endless:
            word = words[place % len(words)]
            yield WordTask(
                WordData(prompt=f"Reverse {word}", system_prompt="You reverse words.", answer=word[::-1]),
                self.config.task,
            )
            place += 1


class InProcessConfig(vf.HarnessConfig):
    turns: int = 1
    stream: bool = False


class InProcess(vf.Harness[InProcessConfig]):
    """Asks `turns` times by HTTP, as a program would."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with httpx.AsyncClient(timeout=30) as client:
            for turn in range(self.config.turns):
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={
                        "model": ctx.model,
                        "messages": messages,
                        "temperature": 0.1,
                        "stream": self.config.stream,
                    },
                )
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                messages.append({"role": "assistant", "content": self._text(answer)})
                if turn + 1 < self.config.turns:
                    messages.append({"role": "user", "content": "Again"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _text(self, answer: httpx.Response) -> str:
        if not self.config.stream:
            return str(answer.json()["choices"][0]["message"]["content"])
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(
            choice["delta"].get("content") or ""
            for event in events
            for choice in json.loads(event)["choices"]
        )


__all__ = ["InProcess", "Words"]
