"""One inference server as the pool sees it, and the few HTTP calls that are made to it.

`Endpoint` is plain state: the pool alone changes it, everyone may read it. `EngineApi` owns no state but the
shared HTTP session; every failure of a call, whatever its cause, comes out as one `EngineError` that names
the endpoint, the call and what the server said. Generation requests do not pass here: environments send them.

`version` and `version_newest` bound the weights that the engine may sample with at this moment; they differ
only while an update is under way or after one that failed. A rollout's span of versions is `version` when it
was dispatched and `version_newest` when it ended.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp
import msgspec

from orchestrator.errors import OrchestratorError
from orchestrator.inference.metrics import EngineMetrics, parse_metrics

_MAX_QUOTED = 300


class InferenceError(OrchestratorError):
    """The inference servers cannot be used; the message names the endpoint and what it said."""

    exit_code = 8


class EngineError(InferenceError):
    """One call to one inference server failed; `status` is the HTTP status, or None if there was no answer."""

    def __init__(self, url: str, message: str, *, status: int | None = None) -> None:
        super().__init__(f"inference endpoint {url}: {message}")
        self.url = url
        self.status = status


class EngineUnfitError(EngineError):
    """The server is up but cannot be used as configured; waiting does not help."""


class EndpointState(StrEnum):
    """Whether an endpoint gets work."""

    STARTING = "starting"  # not seen ready yet
    READY = "ready"  # gets work
    SUSPECT = "suspect"  # answers health checks but finishes nothing: no new work until a probe succeeds
    LOST = "lost"  # does not answer, or does not have the current weights


IN_SERVICE = (EndpointState.READY, EndpointState.SUSPECT)


@dataclass(slots=True, eq=False)
class Endpoint:
    """State of one inference server. `url` is its OpenAI base URL (…/v1), `root` the server's own."""

    url: str
    root: str
    state: EndpointState = EndpointState.STARTING
    inflight: int = 0
    limit: int = 1
    version: int = 0
    version_newest: int = 0
    error: str = ""
    updating: bool = False
    metrics: EngineMetrics | None = None
    metrics_at: float = float("-inf")
    losses: int = 0

    # The pool's own bookkeeping.
    serial: int | None = field(default=None, repr=False)
    label: str | None = field(default=None, repr=False)
    checks_failed: int = field(default=0, repr=False)
    requests_failed: int = field(default=0, repr=False)
    progress_at: float = field(default=float("-inf"), repr=False)
    trusted_until: float = field(default=float("-inf"), repr=False)
    retry_at: float = field(default=float("-inf"), repr=False)
    retries: int = field(default=0, repr=False)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    wake: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def healthy(self) -> bool:
        """Whether it gets work."""
        return self.state is EndpointState.READY

    def describe(self) -> dict[str, Any]:
        """What people want to see of it, as JSON-able values."""
        queue = msgspec.structs.asdict(self.metrics) if self.metrics else None
        return {
            "url": self.url,
            "state": self.state.value,
            "inflight": self.inflight,
            "limit": self.limit,
            "version": self.version,
            "updating": self.updating,
            "losses": self.losses,
            "error": self.error,
            "metrics": queue,
        }


def build_endpoint(base_url: str) -> Endpoint:
    """An endpoint from its configured base URL; the administrative calls live beside its `/v1`."""
    url = base_url.rstrip("/")
    return Endpoint(url=url, root=url.removesuffix("/v1"))


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
        answer = await self._json(
            "GET", f"{self.url}/models", "GET /v1/models", timeout_s=self.check_timeout_s
        )
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list):
            raise EngineError(
                self.url, f"GET /v1/models did not answer with a list of models: {_quote(str(answer))}"
            )
        return [str(entry.get("id")) for entry in entries if isinstance(entry, dict)]

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

    async def probe(self, model: str, timeout_s: float) -> None:
        """Have one token made. Any answer below 500 counts: the question is whether requests come back at all."""
        body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
        call = "POST /v1/chat/completions (probe)"
        try:
            await self._text("POST", f"{self.url}/chat/completions", call, body=body, timeout_s=timeout_s)
        except EngineError as error:
            if error.status is None or error.status >= 500:
                raise

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """GET a path of the server's root; the decoded JSON, or None if the body is no JSON."""
        return await self._json(
            "GET", self.root + path, f"GET {path}", timeout_s=timeout_s or self.check_timeout_s
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
        return await self._json(
            "POST",
            self.root + path,
            f"POST {path}",
            body=body or {},
            query=query,
            timeout_s=timeout_s or self.check_timeout_s,
        )

    async def _json(
        self,
        method: str,
        url: str,
        call: str,
        *,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        text = await self._text(method, url, call, body=body, query=query, timeout_s=timeout_s)
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return None

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
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self.session.request(
                method, url, json=body, params=query, timeout=timeout
            ) as response:
                text = (await response.read()).decode("utf-8", "replace")
                if response.status >= 400:
                    raise EngineError(
                        self.url, f"{call} answered {response.status}: {_quote(text)}", status=response.status
                    )
                return text
        except TimeoutError as error:
            raise EngineError(self.url, f"{call} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(self.url, f"{call} failed: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        # asyncio replaces the system's words by its own, which say nothing of the cause.
        number = error.os_error.errno
        return f"cannot connect ({os.strerror(number) if number else error.os_error})"
    return str(error) or type(error).__name__


def _quote(text: str) -> str:
    text = " ".join(text.split())
    return f'"{text[:_MAX_QUOTED]}…"' if len(text) > _MAX_QUOTED else f'"{text}"'
