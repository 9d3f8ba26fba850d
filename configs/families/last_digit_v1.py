"""A taskset of verifiers v1, and a harness that asks once without starting a program: the last digit of a number."""

import random

import httpx
import verifiers.v1 as vf


class NumberData(vf.TaskData):
    answer: str


class NumberTask(vf.Task[NumberData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace) -> float:
        return float((trace.last_message.content or "").strip() == self.data.answer)


class LastDigit(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self):
        numbers = random.Random(0)
        for _ in range(200):
            number = str(numbers.randrange(1000, 10_000))
            yield NumberTask(
                NumberData(prompt=f"Last digit of {number}", answer=number[-1]), self.config.task
            )


class AskOnce(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        async with httpx.AsyncClient(timeout=None) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": [{"role": "user", "content": prompt}]},
            )
        return vf.ProgramResult(exit_code=int(answer.status_code != 200), stdout="", stderr=answer.text)


__all__ = ["AskOnce", "LastDigit"]
