"""Decoding: every request that waits takes part in the next step of one batch.

`Engine.generate` is the waiting shell; the batch itself (`_admit`, `_step`) is synchronous and changes only
between two awaits of `run`, so that new weights and pauses apply between two tokens, never inside one.
A request whose caller goes away leaves the batch at its next step. Speaks no HTTP.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from orchestrator.local.policy import Float32s, Int64s, Policy, find_rows, read_prompt
from orchestrator.local.tokenizer import ASSISTANT, END, decode


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the end mark, or a stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # the engine was told to


class PauseMode(StrEnum):
    """What a pause does to requests in flight; new ones wait in any case."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@dataclass(slots=True)
class Sampling:
    """How to sample one completion. Temperature 0 takes the likeliest token."""

    max_tokens: int = 16
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(slots=True, eq=False)
class Generation:
    """One completion, growing while it is decoded.

    `logprobs` are those of the distribution that was sampled from; at temperature 0, the policy's own.
    """

    prompt: list[int]
    sampling: Sampling
    future: asyncio.Future[None]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = FinishReason.ABORT
    keys: list[int] = field(init=False)
    last: list[int] = field(init=False)
    rng: np.random.Generator | None = field(init=False)

    def __post_init__(self) -> None:
        self.keys, self.last = read_prompt(self.prompt)
        seed = self.sampling.seed
        self.rng = None if seed is None else np.random.default_rng(seed)


class Engine:
    """Serves one policy; `run` decodes until cancelled."""

    def __init__(
        self, policy: Policy, *, seed: int = 0, latency_s: float = 0.0, max_batch: int = 256
    ) -> None:
        self.policy = policy
        self.max_batch = max_batch
        self.latency_s = latency_s
        self.paused = False
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._frozen = False
        self._rng = np.random.default_rng(seed)
        self._requests: set[Generation] = set()
        self._waiting: deque[Generation] = deque()
        self._batch: list[Generation] = []
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()

    @property
    def running(self) -> int:
        """Requests being decoded, those held back by the added latency included."""
        return len(self._requests) - len(self._waiting)

    @property
    def waiting(self) -> int:
        """Requests that are not being decoded yet."""
        return len(self._waiting)

    async def generate(self, prompt: list[int], sampling: Sampling) -> Generation:
        """Decode one completion."""
        loop = asyncio.get_running_loop()
        completion = Generation(prompt, sampling, loop.create_future())
        self._requests.add(completion)
        self.prompt_tokens += len(prompt)
        delay = loop.call_later(self.latency_s, self._enqueue, completion) if self.latency_s else None
        if delay is None:
            self._enqueue(completion)
        try:
            await completion.future
        except asyncio.CancelledError:
            if completion in self._waiting:
                self._waiting.remove(completion)
            raise
        finally:
            if delay is not None:
                delay.cancel()
            self._requests.discard(completion)
        return completion

    async def run(self) -> None:
        """Decode step after step while there is work."""
        while True:
            await self._wake.wait()
            self._admit()
            if self._batch and not self._frozen:
                self._step()
            if not self._batch:
                self._drained.set()
            if self._frozen or not (self._batch or (self._waiting and not self.paused)):
                self._wake.clear()
            # Requests that arrived during the step join the next one.
            await asyncio.sleep(0)

    async def pause(self, mode: PauseMode) -> None:
        """Stop taking requests in; returns when the mode's promise about those in flight holds."""
        self.paused = True
        self._frozen = mode is PauseMode.KEEP
        if mode is PauseMode.ABORT:
            self.abort()
        elif mode is PauseMode.WAIT:
            self._drained.clear()
            self._wake.set()
            await self._drained.wait()

    def resume(self) -> None:
        """Go on with what was kept and what has arrived since."""
        self.paused = self._frozen = False
        self._wake.set()

    def abort(self) -> None:
        """End every request now, with the tokens it has."""
        for completion in self._requests:
            _finish(completion, FinishReason.ABORT)
        self._batch.clear()
        self._waiting.clear()

    def _enqueue(self, completion: Generation) -> None:
        if not completion.future.done():
            self._waiting.append(completion)
            self._wake.set()

    def _admit(self) -> None:
        self._batch = [completion for completion in self._batch if not completion.future.done()]
        while self._waiting and not self.paused and len(self._batch) < self.max_batch:
            completion = self._waiting.popleft()
            if not completion.future.done():
                self._batch.append(completion)

    def _step(self) -> None:
        """One token for every completion of the batch."""
        batch = self._batch
        rows = find_rows(
            np.array([completion.keys for completion in batch], np.uint64),
            np.array([len(completion.token_ids) for completion in batch], np.int64),
            np.array([(completion.token_ids or _START)[-1] for completion in batch], np.int64),
        )
        logprobs = self.policy.log_probabilities(
            rows, np.array([completion.last for completion in batch], np.int64)
        )
        draws = self._rng.random(len(batch))
        for number, completion in enumerate(batch):
            if completion.rng is not None:
                draws[number] = completion.rng.random()
        temperatures = np.array([completion.sampling.temperature for completion in batch])
        actions = choose(logprobs, temperatures, draws)
        chosen = at_temperature(logprobs, temperatures)[np.arange(len(batch)), actions].tolist()
        for completion, action, logprob in zip(batch, actions.tolist(), chosen, strict=True):
            _extend(completion, action, logprob)
        self.generated_tokens += len(batch)
        self._batch = [completion for completion in batch if not completion.future.done()]


_START = [ASSISTANT]


def choose(logprobs: Float32s, temperatures: NDArray[np.float64], draws: NDArray[np.float64]) -> Int64s:
    """The output whose share of each row its draw from [0, 1) falls into; the likeliest at temperature 0."""
    scaled = logprobs / np.maximum(temperatures, 1e-3)[:, None]
    scaled -= scaled.max(axis=1, keepdims=True)
    cumulative = np.exp(scaled).cumsum(axis=1)
    sampled = (cumulative <= (draws * cumulative[:, -1])[:, None]).sum(axis=1)
    chosen: Int64s = np.where(temperatures > 0, sampled, logprobs.argmax(axis=1))
    return chosen


def at_temperature(logprobs: Float32s, temperatures: NDArray[np.float64]) -> Float32s:
    """The rows as they are sampled from; at temperature 0 and 1 as they are."""
    if np.isin(temperatures, (0.0, 1.0)).all():
        return logprobs
    scaled = logprobs / np.where(temperatures > 0, np.maximum(temperatures, 1e-3), 1.0)[:, None]
    scaled -= scaled.max(axis=1, keepdims=True)
    scaled -= np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    return scaled.astype(np.float32)


def _extend(completion: Generation, token: int, logprob: float) -> None:
    completion.token_ids.append(token)
    completion.logprobs.append(logprob)
    if token == END:
        _finish(completion, FinishReason.STOP)
        return
    if completion.sampling.stop:
        text = decode(completion.token_ids)
        for stop in completion.sampling.stop:
            if text.endswith(stop):
                _finish(completion, FinishReason.STOP, text.removesuffix(stop))
                return
    if len(completion.token_ids) >= completion.sampling.max_tokens:
        _finish(completion, FinishReason.LENGTH)


def _finish(completion: Generation, reason: FinishReason, text: str | None = None) -> None:
    if not completion.future.done():
        completion.text = decode(completion.token_ids) if text is None else text
        completion.finish_reason = reason
        completion.future.set_result(None)
