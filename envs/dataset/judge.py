"""A language model at another endpoint says what a reply is worth. It is never trained on.

It is asked with a template over the row's columns and `{reply}`, and the last number that it writes counts, from 0 to
`best`. A judge that cannot be reached, or writes no such number, is a failed rollout that is tried again, never a zero.
Its failures have kinds of their own (`judge_connection`, …), so that nobody blames the policy's servers for them.
"""

import os
import re
from typing import Any

from envs.dataset.answers import last_number
from envs.dataset.rows import Row
from envs.dataset.scoring import Score, Scorer
from envs.dataset.template import Template, TemplateError
from envs.errors import RolloutFailure, shown_url
from envs.inference_client import InferenceClient
from envs.model import Model, ModelSettings

_REPLY = "reply"
_THOUGHT = "</think>"
_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


class Judge(Scorer):
    """`base_url` with its /v1, `model` and `prompt`; the key is that of the variable `api_key_env`. `sampling` as in the configuration."""

    def __init__(
        self,
        base_url: str,
        model: str,
        prompt: str,
        system: str = "",
        best: float = 1.0,
        api_key_env: str = "",
        sampling: dict[str, Any] | None = None,
        at_once: int = 64,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url {base_url!r} is not like http://127.0.0.1:8000/v1")
        if best <= 0 or at_once < 1:
            raise ValueError("best must be positive, and at_once at least 1")
        try:
            self._prompt = Template(prompt)
        except TemplateError as error:
            raise ValueError(f"prompt: {error}") from None
        if _REPLY not in self._prompt.columns:
            raise ValueError("prompt must show the judge the {reply}")
        if api_key_env and not os.environ.get(api_key_env):
            raise ValueError(f"the environment variable {api_key_env} is not set")
        self.columns = [column for column in self._prompt.columns if column != _REPLY]
        self._system = system
        self._best = best
        self._base_url = base_url
        self._client = InferenceClient(limit=at_once)
        self._settings = ModelSettings(
            model=model,
            sampling={"temperature": 0.0, **(sampling or {})},
            api_key=os.environ.get(api_key_env) if api_key_env else None,
            train=False,
        )

    async def setup(self) -> None:
        await self._client.__aenter__()

    async def close(self) -> None:
        await self._client.aclose()

    async def score(self, reply: str, row: Row) -> Score:
        messages = [{"role": "user", "content": self._prompt.render({**row, _REPLY: reply})}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        judge = Model(self._settings, client=self._client, base_url=self._base_url)
        try:
            said = await judge.chat(messages)
        except RolloutFailure as failure:
            raise RolloutFailure(
                f"judge_{failure.kind}", f"judge: {failure.message}", retryable=failure.retryable
            ) from None
        number = last_number(_without_thoughts(said.text))
        if number is None or not 0 <= number <= self._best:
            raise RolloutFailure(
                "judge_unreadable",
                f"the judge at {shown_url(self._base_url)} wrote no number from 0 to {self._best:g}: {said.text[-200:]!r}",
                retryable=True,
            )
        return Score(float(number) / self._best)


def _without_thoughts(text: str) -> str:
    # Behind the last end of a thought there is none, and a search from every beginning of one would take long.
    end = text.rfind(_THOUGHT) + len(_THOUGHT) if _THOUGHT in text else 0
    return _THINKING.sub("", text[:end]) + text[end:]
