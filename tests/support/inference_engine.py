"""An inference server for the pool's tests: a real HTTP server that answers like vLLM or SGLang, or misbehaves on demand.

It is scripted from outside: `broken` maps a path to a status, `upcoming` to the statuses of its next calls,
`answers` to a whole answer; `stuck` holds paths that answer only when `unstick` is called; `refused` holds weights
that it cannot load; `lora` lets it load adapters; `restart` forgets what a restarted engine forgets. It keeps a list of the calls it got.

Its next token has the logits `LOGITS`. `logprobs` says which log-probabilities it returns for it: from before
everything ("raw"), after temperature alone ("temperature") or after cuts too ("processed"); `logprobs_mode`
is what it says about that, if anything.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from aiohttp import web

LOGITS = (2.0, 1.0, 0.0, -1.0)


@dataclass(eq=False)
class ScriptedEngine:
    """One engine on a port of its own that stays the same over `stop` and `start`."""

    model: str = "tiny"
    dev_mode: bool = True
    lora: bool = False
    root: str | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    weights: str = "initial"
    label: str = "default"
    paused: bool = False
    aborted: int = 0
    metrics: str | None = None
    token: str | None = None
    prefix: str = "/v1"
    token_ids: bool = True
    logprobs: str = "processed"
    top_logprobs: bool = True
    logprobs_mode: str | None = None
    generation_config: str = "auto"
    unknown_fields: frozenset[str] = frozenset()
    refused: set[str] = field(default_factory=set)
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    upcoming: dict[str, list[int]] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    weights_while_paused: list[bool] = field(default_factory=list)
    port: int = 0
    _unstick: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _runner: web.AppRunner | None = None
    _listener: socket.socket | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unstick()
        await self.stop()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        await web.SockSite(self._runner, self._listener).start()
        self.port = self._listener.getsockname()[1]

    async def stop(self) -> None:
        if self._runner is not None:
            assert self._listener is not None
            # A connection that was just being accepted reaches the server some rounds of the loop later; asyncio would
            # forget its socket, and not close it, if the server were closed by then.
            asyncio.get_running_loop().remove_reader(self._listener)
            for _ in range(5):
                await asyncio.sleep(0)
            await self._runner.cleanup()
            self._runner = self._listener = None

    def restart(self) -> None:
        """What an engine forgets when its process ends and starts again."""
        self.weights, self.label, self.paused = "initial", "default", False
        self.adapters.clear()

    def unstick(self) -> None:
        self.stuck.clear()
        self._unstick.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds; looked at after every call."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _serve(self, request: web.Request) -> web.Response:
        path = request.path
        self.calls.append(f"{request.method} {path}")
        async with self._changed:
            self._changed.notify_all()
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if path in self.stuck:
            await self._unstick.wait()
        status = self.upcoming[path].pop(0) if self.upcoming.get(path) else self.broken.get(path, 200)
        if status != 200:
            return web.Response(status=status, text=f"{path} is broken")
        if path in self.answers:
            status, text = self.answers[path]
            return web.Response(status=status, text=text, content_type="text/html")
        handler = self._handlers().get(path)
        if handler is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json() if request.can_read_body else {}
        answer = await handler(body, dict(request.query))
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    def _handlers(self) -> dict[str, Callable[[dict[str, Any], dict[str, str]], Awaitable[Any]]]:
        handlers: dict[str, Callable[[dict[str, Any], dict[str, str]], Awaitable[Any]]] = {
            "/health": self._health,
            f"{self.prefix}/models": self._models,
            f"{self.prefix}/chat/completions": self._chat,
        }
        if self.metrics is not None:
            handlers["/metrics"] = self._metrics
        if self.logprobs_mode is not None:
            handlers["/server_info"] = self._server_info
        if self.dev_mode:
            handlers |= {
                "/pause": self._pause,
                "/resume": self._resume,
                "/is_paused": self._is_paused,
                "/collective_rpc": self._reload,
                "/update_weight_version": self._set_label,
                "/weight_info": self._weight_info,
                "/pause_generation": self._pause,
                "/continue_generation": self._resume,
                "/update_weights_from_disk": self._load_sglang,
                "/abort_request": self._abort,
                "/model_info": self._weight_info,
            }
        if self.lora:
            handlers |= {
                "/v1/load_lora_adapter": self._load_lora,
                "/v1/unload_lora_adapter": self._unload_lora,
            }
        return handlers

    async def _load_lora(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        name, path = body.get("lora_name"), body.get("lora_path")
        if not name or not path:
            return web.json_response({"error": {"message": "Both must be provided."}}, status=400)
        assert name not in self.adapters, "a name is never used twice"
        assert not body.get("load_inplace")
        if path in self.refused:
            message = "LoRA rank 64 is greater than max_lora_rank 16."
            return web.json_response({"error": {"message": message}}, status=500)
        self.adapters[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_lora(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        del self.adapters[body["lora_name"]]
        return web.Response(text="Success")

    async def _health(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        return web.Response(text="")

    async def _models(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        return {
            "object": "list",
            "data": [{"id": name, "root": self.root} for name in (self.model, *self.adapters)],
        }

    async def _chat(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        if unknown := sorted(self.unknown_fields.intersection(body)):
            message = f"Unrecognized request argument supplied: {', '.join(unknown)}"
            return web.json_response({"error": {"message": message}}, status=400)
        choice: dict[str, Any] = {"message": {"content": "."}, "finish_reason": "length"}
        answer: dict[str, Any] = {"choices": [choice]}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [self._first_token(body)]}
        if self.token_ids and body.get("return_token_ids"):
            choice["token_ids"] = [5]
            answer["prompt_token_ids"] = [1, 2, 3]
        return answer

    def _first_token(self, body: dict[str, Any]) -> dict[str, Any]:
        logits = np.array(LOGITS)
        if self.logprobs != "raw":
            logits /= body.get("temperature", 1.0)
        if self.logprobs == "processed" and body.get("top_k", -1) > 0:
            logits = logits[: body["top_k"]]
        values = (logits - np.log(np.exp(logits).sum())).tolist()
        entries = [{"token": f"t{number}", "logprob": value} for number, value in enumerate(values)]
        count = body.get("top_logprobs", 0) if self.top_logprobs else 0
        return {**entries[0], "top_logprobs": entries[:count]}

    async def _server_info(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        assert query == {"config_format": "json"}
        model = {"logprobs_mode": self.logprobs_mode, "generation_config": self.generation_config}
        return {"vllm_config": {"model_config": model}}

    async def _metrics(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        return web.Response(text=self.metrics or "")

    async def _pause(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        mode = query.get("mode") or body.get("mode", "abort")
        self.calls[-1] += f" {mode}"
        if mode == "keep":
            assert query.get("clear_cache") == "true"
        self.aborted += mode == "abort"
        self.paused = True
        return {"status": "paused"}

    async def _abort(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        self.aborted += 1
        return {}

    async def _resume(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        self.paused = False
        return {"status": "resumed"}

    async def _is_paused(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        return {"is_paused": self.paused}

    async def _reload(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        assert body["method"] == "reload_weights"
        if body["kwargs"]["weights_path"] in self.refused:
            return web.Response(status=500, text="size mismatch for lm_head.weight")
        self._load(body["kwargs"]["weights_path"])
        return {"results": [None]}

    async def _load_sglang(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        assert body["flush_cache"] is True
        if "bad" in body["model_path"]:
            return web.json_response({"success": False, "message": "shapes differ"}, status=400)
        self._load(body["model_path"])
        self.label = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights."}

    def _load(self, path: str) -> None:
        self.weights_while_paused.append(self.paused)
        self.weights = path

    async def _set_label(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        assert self.paused, "the label must change while nothing is sampled"
        self.label = body["new_version"]
        return {"success": True}

    async def _weight_info(self, body: dict[str, Any], query: dict[str, str]) -> Any:
        return {"weight_version": self.label}


def safetensors(data_bytes: int = 16, name: str = "w") -> bytes:
    """A safetensors file with one tensor of this size."""
    header = {
        "__metadata__": {"format": "pt"},
        name: {"dtype": "U8", "shape": [data_bytes], "data_offsets": [0, data_bytes]},
    }
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(data_bytes)


def folder_of_weights(parent: Path, name: str = "weights") -> Path:
    """A folder as a trainer writes weights to it."""
    folder = parent / name
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder


def folder_of_adapter(parent: Path, name: str = "adapter", *, rank: int = 4, r: Any = None) -> Path:
    """A LoRA adapter of one layer; `r` is what its configuration says, if something else than its rank."""
    folder = parent / name
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": rank if r is None else r,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    size = 2 * rank
    header = {
        f"{layer}.lora_A.weight": {"dtype": "U8", "shape": [rank, 2], "data_offsets": [0, size]},
        f"{layer}.lora_B.weight": {"dtype": "U8", "shape": [2, rank], "data_offsets": [size, 2 * size]},
    }
    encoded = json.dumps(header).encode()
    content = len(encoded).to_bytes(8, "little") + encoded + bytes(2 * size)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder
