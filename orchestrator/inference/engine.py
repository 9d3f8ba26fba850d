"""The few HTTP calls that are made to an inference server.

`EngineApi` owns no state but the shared HTTP session; every failure of a call, whatever its cause, comes out
as one `EngineError` that names the endpoint, the call and what the server said. Generation requests do not pass
here: environments send them. The one exception is the probe, which asks for a single token to see whether
requests are answered as environments need it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from envs.completion import decode_completion, read_turn
from envs.errors import RolloutFailure, shown_url
from orchestrator.errors import ConfigError, InferenceError
from orchestrator.inference.metrics import EngineMetrics, parse_metrics

_MAX_QUOTED = 300
# Statuses with which a server that works refuses one request, or asks for patience.
_ALIVE = frozenset({400, 413, 422, 429})
_TOKEN_IDS = {
    "logprobs": True,
    "return_token_ids": True,
    # Older SGLang servers know these instead; others skip fields that they do not know.
    "return_meta_info": True,
    "return_prompt_token_ids": True,
}


_TLS_PORT = "; it is a TLS port: write https:// instead of http:// in inference.base_urls"


class EngineError(InferenceError):
    """One call to one inference server failed.

    `said` is the message without the endpoint's name; `status` is the HTTP status, or None if there was no answer.
    """

    def __init__(self, url: str, said: str, *, status: int | None = None) -> None:
        super().__init__(f"inference endpoint {shown_url(url)}: {said}")
        self.url = url
        self.said = said
        self.status = status


class EngineUnfitError(EngineError):
    """The server is up but cannot be used as configured; waiting does not help."""


class EngineRefusedError(EngineError):
    """The server works, but what it returns must not be trained on: it stays out, and others go on without it.

    Where there is no other at the start, the configuration cannot be used.
    """

    exit_code = ConfigError.exit_code


class EngineAwayError(EngineError):
    """The server did not answer before it was asked to load anything: nothing is known against the weights."""


def reason_of(error: InferenceError) -> str:
    """What went wrong, to be shown beside the endpoint's name."""
    return error.said if isinstance(error, EngineError) else str(error)


@dataclass(frozen=True, slots=True)
class EngineApi:
    """Calls to one inference server over the pool's HTTP session. Each is bounded by a timeout."""

    url: str
    root: str
    session: aiohttp.ClientSession
    check_timeout_s: float

    async def check_health(self) -> None:
        """Raise EngineError unless the server says that it is well; a server without `/health` is asked for models."""
        try:
            await self.get("/health")
        except EngineError as error:
            if error.status != 404:
                raise
            await self.models()

    async def models(self) -> list[str]:
        """Names that the server serves."""
        try:
            text = await self._get_models(self.url)
        except EngineError as error:
            if error.status != 404:
                raise
            raise EngineError(self.url, error.said + await self._guess_base_url(), status=404) from error
        names = _model_names(text)
        if names is None:
            raise EngineError(
                self.url,
                f"GET {self._models_path()} did not answer with a list of models: {quote(text)}",
                status=200,
            )
        return names

    async def check_model(self, model: str) -> None:
        """Raise EngineUnfitError unless the server lists the model."""
        names = await self.models()
        if model not in names:
            listed = ", ".join(f'"{name}"' for name in names) or "nothing"
            raise EngineUnfitError(
                self.url,
                f'serves {listed}, not "{model}"; set model.name to a served name or start the server with it',
            )

    async def read_metrics(self) -> EngineMetrics | None:
        """The engine's own counters, or None if it exports none that are known."""
        try:
            return parse_metrics(
                await self._text(
                    "GET", f"{self.root}/metrics", "GET /metrics", timeout_s=self.check_timeout_s
                )
            )
        except EngineError as error:
            if error.status is not None and 400 <= error.status < 500:
                return None
            raise

    async def probe(self, model: str, *, timeout_s: float, token_ids: bool) -> None:
        """Have one token made. EngineError unless a chat completion comes back, with token ids if they are needed.

        A server that refuses this one request, in JSON and with a reason, works too.
        """
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": "."}],
            "max_tokens": 1,
        }
        if token_ids:
            body |= _TOKEN_IDS
        call = "POST /chat/completions (probe)"
        status, text = await self.complete(body, timeout_s=timeout_s)
        if status in _ALIVE and _is_refusal(text):
            return
        if status != 200:
            raise EngineError(self.url, f"{call} answered {status}: {quote(text)}", status=status)
        try:
            completion = decode_completion(text.encode(), endpoint="the server")
            if token_ids:
                read_turn(completion, endpoint="the server")
        except RolloutFailure as failure:
            said = f"{call}: {failure.message}; it said {quote(text)}"
            raise EngineError(self.url, said, status=status) from failure

    async def complete(self, body: Mapping[str, Any], *, timeout_s: float) -> tuple[int, str]:
        """Ask for a chat completion of a token or so: status and body of the answer; EngineError if there was none."""
        call = "POST /chat/completions (probe)"
        return await self._request(
            "POST", f"{self.url}/chat/completions", call, body=body, timeout_s=timeout_s
        )

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """GET a path of the server's root; the decoded JSON, or None if the body is no JSON."""
        return _decode(
            await self._text(
                "GET", self.root + path, f"GET {path}", timeout_s=timeout_s or self.check_timeout_s
            )
        )

    async def post(
        self,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """POST to a path of the server's root; the decoded JSON, or None if the body is no JSON."""
        return _decode(
            await self._text(
                "POST",
                self.root + path,
                f"POST {path}",
                body=body or {},
                query=query,
                timeout_s=timeout_s or self.check_timeout_s,
            )
        )

    def _models_path(self) -> str:
        return "/models" if self.url == self.root else "/v1/models"

    async def _get_models(self, base_url: str) -> str:
        call = f"GET {self._models_path()}"
        return await self._text("GET", f"{base_url}/models", call, timeout_s=self.check_timeout_s)

    async def _guess_base_url(self) -> str:
        """What to do about a server that has no models where they were looked for; empty if nobody knows."""
        has_v1 = self.url != self.root
        other = self.root if has_v1 else f"{self.root}/v1"
        try:
            found = _model_names(await self._get_models(other))
        except EngineError:
            return ""
        if found is None:
            return ""
        remedy = "it answers without /v1: take" if has_v1 else "it answers with /v1: add"
        return f"; {remedy} /v1 {'off' if has_v1 else 'to'} its entry in inference.base_urls"

    async def _text(
        self,
        method: str,
        url: str,
        call: str,
        *,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> str:
        status, text = await self._request(method, url, call, body=body, query=query, timeout_s=timeout_s)
        if status >= 400:
            said = f"{call} answered {status}: {quote(text)}{self._guess_refusal(status, text)}"
            raise EngineError(self.url, said, status=status)
        return text

    def _guess_refusal(self, status: int, text: str) -> str:
        """What to do about an answer that says why in its own way; empty where it needs no more words."""
        if status in (401, 403):
            if "Authorization" in self.session.headers:
                return "; it refuses the API key in the variable that inference.api_key_env names"
            return "; it wants an API key: name the variable that holds it in inference.api_key_env"
        if status == 400 and "https" in text.lower() and self.root.startswith("http://"):
            return _TLS_PORT
        return ""

    async def _request(
        self,
        method: str,
        url: str,
        call: str,
        *,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        """Status and body of whatever answer there was; EngineError if there was none."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self.session.request(
                method, url, json=body, params=query, timeout=timeout
            ) as response:
                return response.status, (await response.read()).decode("utf-8", "replace")
        except TimeoutError as error:
            raise EngineError(self.url, f"{call} did not answer within {timeout_s:g} s") from error
        # The last is for a name that no name server could have.
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            guess = await self._guess_scheme(error)
            raise EngineError(self.url, f"{call} failed: {_describe(error)}{guess}") from error

    async def _guess_scheme(self, error: Exception) -> str:
        """What to do about a connection that broke because one side spoke TLS; empty if that is not the cause."""
        if isinstance(error, aiohttp.ClientConnectorSSLError):
            if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER_FAILURE" in str(error):
                return (
                    "; it does not speak TLS there: write http:// instead of https:// in inference.base_urls"
                )
            return ""
        broken = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
        refused = isinstance(error, aiohttp.ClientConnectorError)
        if not self.root.startswith("http://") or not broken or refused:
            return ""
        url = f"https://{self.root.removeprefix('http://')}/health"
        timeout = aiohttp.ClientTimeout(total=self.check_timeout_s)
        try:
            async with self.session.get(url, timeout=timeout, ssl=False):
                return _TLS_PORT
        except (aiohttp.ClientError, OSError, TimeoutError):
            return ""


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def _model_names(text: str) -> list[str] | None:
    """The ids in a list of models, or None if it is none."""
    answer = _decode(text)
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        return None
    return [str(entry.get("id")) for entry in entries if isinstance(entry, dict)]


def _is_refusal(text: str) -> bool:
    """Whether a body is an API's complaint about a request, and not a page of something in between."""
    answer = _decode(text)
    return isinstance(answer, dict) and any(key in answer for key in ("error", "message", "detail"))


def _describe(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        # asyncio replaces the system's words by its own, which say nothing of the cause.
        number = error.os_error.errno
        # Failures to find a name have numbers of their own, below zero.
        said = os.strerror(number) if number and number > 0 else error.os_error.strerror or error.os_error
        return f"cannot connect ({said})"
    return str(error) or type(error).__name__


def quote(text: str) -> str:
    """What a server said, on one line and not too long."""
    text = " ".join(text.split())
    return f'"{text[:_MAX_QUOTED]}…"' if len(text) > _MAX_QUOTED else f'"{text}"'
