"""Whether an engine's log-probabilities are those of the distribution that training samples from.

Engines fill in what a request does not set from the model folder's `generation_config.json`, so training sets
everything that shapes the distribution (`NEUTRAL`, under what is configured). And vLLM returns log-probabilities from
before temperature and cuts unless it is told otherwise; they are right only where neither is used. So every engine is
asked before it gets work, and where it does not say, it is tried with single tokens.

An engine that does not fit is refused: it stays out, others go on. Nothing here is about evaluations, which are
sampled as the model's own defaults say and carry no log-probabilities.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from envs.errors import shown_url
from orchestrator.inference.engine import EngineApi, EngineError, EngineRefusedError, quote

log = structlog.get_logger(__name__)

NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Samples from the policy itself: sent for training wherever the configuration sets nothing else."""

_CUTS = ("top_p", "top_k", "min_p")
_OFF: Mapping[str, tuple[Any, ...]] = {
    **{name: (value,) for name, value in NEUTRAL.items()},
    "top_k": (-1, 0),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
}
"""What shapes the distribution, and the values that leave it alone."""

_PROCESSED = "processed_logprobs"
_RAW = "raw_logprobs"
_BEFORE_ALL = "returns log-probabilities from before temperature and cuts"
_SAME = 1e-3
"""Log-probabilities that are closer are equal: engines round by the shape of a batch."""
_REMEDY = (
    "start vLLM with --logprobs-mode processed_logprobs, sample with temperature = 1 and without cuts and penalties, "
    "or accept the difference with inference.accept_raw_logprobs = true"
)


def shaping(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the sampling parameters that makes the distribution another than the policy's own."""
    return {
        name: value
        for name, value in sampling.items()
        if name in _OFF and value is not None and value not in _OFF[name]
    }


@dataclass(frozen=True, slots=True)
class SamplingCheck:
    """What training asks of every engine. `samplings` are the parameters of each training env, by the env's name."""

    model: str
    samplings: Mapping[str, Mapping[str, Any]]
    accept_raw: bool
    timeout_s: float

    async def check(self, api: EngineApi) -> None:
        """EngineRefusedError if what the engine returns cannot be trained on; EngineError if it does not answer."""
        config = await self._read_model_config(api)
        mode = config.get("logprobs_mode")
        if mode is None:
            await self._check_fields(api)
        elif mode not in (_PROCESSED, _RAW):
            said = f'returns "{mode}" where training needs log-probabilities; start vLLM with --logprobs-mode {_PROCESSED}'
            raise EngineRefusedError(api.url, said)
        self._warn_of_defaults(api, config.get("generation_config"))
        shaped = {env: found for env, sampling in self.samplings.items() if (found := shaping(sampling))}
        if not shaped or self.accept_raw or mode == _PROCESSED:
            return
        names = {name for found in shaped.values() for name in found}
        complaint = _BEFORE_ALL if mode == _RAW else await self._try_out(api, names)
        if complaint:
            env, found = next(iter(shaped.items()))
            asked = ", ".join(f"{name} = {value}" for name, value in found.items())
            raise EngineRefusedError(
                api.url, f'{complaint}, but env "{env}" is trained with {asked}; {_REMEDY}'
            )

    async def _check_fields(self, api: EngineApi) -> None:
        """A server that refuses fields which it does not know would fail every rollout."""
        fields = {
            name: sampling[name]
            for sampling in self.samplings.values()
            for name in NEUTRAL
            if name in sampling
        }
        if not fields:
            return
        status, text = await self._ask(api, fields)
        named = [name for name in fields if name in text]
        if status in (400, 422) and named:
            raise EngineRefusedError(
                api.url,
                f"refuses {', '.join(named)}, which training sends ({quote(text)}); set train.neutral_sampling = false "
                "to send only what train.sampling names",
            )

    def _warn_of_defaults(self, api: EngineApi, generation_config: Any) -> None:
        missing = [
            name
            for name in NEUTRAL
            if any(sampling.get(name) is None for sampling in self.samplings.values())
        ]
        if missing and generation_config not in (None, "vllm"):
            log.warning(
                "endpoint.own_defaults",
                endpoint=shown_url(api.url),
                parameters=missing,
                remedy="generation_config.json in the model's folder decides on them; set them in train.sampling, "
                "or start vLLM with --generation-config vllm",
            )

    async def _try_out(self, api: EngineApi, names: Collection[str]) -> str:
        """What is wrong with the log-probabilities of a server that does not say; empty if nothing is."""
        cold = await self._likeliest(api, {**NEUTRAL, "temperature": 0.5})
        hot = await self._likeliest(api, {**NEUTRAL, "temperature": 2.0})
        both = [(cold[token], hot[token]) for token in cold if token in hot]
        if not both:
            return "does not say which log-probabilities it returns (no logprobs_mode, no top_logprobs)"
        if all(abs(one - other) < _SAME for one, other in both):
            return _BEFORE_ALL
        if any(name in names for name in _CUTS):
            # Where the cut leaves a single token, that one has probability 1.
            alone = await self._first_token(api, {**NEUTRAL, "temperature": 2.0, "top_k": 1})
            if abs(alone.logprob) > _SAME:
                return "returns log-probabilities from before top_p, top_k and min_p"
        return ""

    async def _likeliest(self, api: EngineApi, sampling: Mapping[str, Any]) -> dict[str, float]:
        found = await self._first_token(api, {**sampling, "top_logprobs": 5})
        return {entry.token: entry.logprob for entry in found.top_logprobs}

    async def _first_token(self, api: EngineApi, sampling: Mapping[str, Any]) -> "_Token":
        status, text = await self._ask(api, {**sampling, "logprobs": True})
        try:
            [choice] = _decoder.decode(text).choices
            return choice.logprobs.content[0]
        except (msgspec.DecodeError, ValueError, IndexError):
            said = f"a request for log-probabilities answered {status}: {quote(text)}"
            raise EngineError(api.url, said, status=status) from None

    async def _read_model_config(self, api: EngineApi) -> Mapping[str, Any]:
        """What vLLM says about its model, empty where there is nobody who says it."""
        try:
            # The first answer looks at the whole machine, which takes seconds.
            answer = await api.get("/server_info?config_format=json", timeout_s=self.timeout_s)
        except EngineError as error:
            if error.status is None:
                raise
            return {}
        for key in ("vllm_config", "model_config"):
            answer = answer.get(key) if isinstance(answer, dict) else None
        return answer if isinstance(answer, dict) else {}

    async def _ask(self, api: EngineApi, sampling: Mapping[str, Any]) -> tuple[int, str]:
        messages = [{"role": "user", "content": "."}]
        body = {"model": self.model, "messages": messages, "max_tokens": 1, **sampling}
        return await api.complete(body, timeout_s=self.timeout_s)


class _Token(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: "list[_Token]" = []


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Answer)
