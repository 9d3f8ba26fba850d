"""An OpenAI-compatible HTTP server for the policy, driven the way vLLM is driven.

Chat completions with token ids and log-probabilities, health, models, metrics under vLLM's names, pausing, and
new weights from a folder. A mistake in a request is answered in OpenAI's error form and changes nothing; weights
that cannot be loaded leave the old ones in place. Holds no state but its engine's and the label of the weights.

As a child process (`python -m orchestrator.local.server`) it reads its `PolicyServerSpec` as one JSON line from
standard input, prints one JSON line with its `base_url` when it is ready, and ends when standard input does:
no server outlives the process that started it.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from envs.lifeline import Lifeline
from envs.listening import stop_listening
from orchestrator.local.chat import ChatRequest, RequestError, decode_body, describe_completion, read_request
from orchestrator.local.engine import Engine, PauseMode
from orchestrator.local.lifeline import read_spec
from orchestrator.local.policy import Policy, WeightsError, load_policy

_SHUTDOWN_S = 2.0


class PolicyServerSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What a server needs to know.

    Port 0 picks a free one; `reuse_port` is for a port that the parent holds with `reserve_port`. `weights` is a
    folder to start from.
    """

    host: str = "127.0.0.1"
    port: int = 0
    model: str = "local"
    seed: int = 0
    latency_s: float = 0.0
    max_model_len: int = 32768
    max_num_seqs: int = 256
    weights: str | None = None
    reuse_port: bool = False


class RpcRequest(msgspec.Struct):
    """A call to the engine's workers; only `reload_weights` is known."""

    method: str
    kwargs: dict[str, Any] = {}


class VersionRequest(msgspec.Struct):
    """A label for the weights."""

    new_version: str


class PolicyServer:
    """The routes of one engine."""

    def __init__(self, spec: PolicyServerSpec, engine: Engine) -> None:
        self.spec = spec
        self.engine = engine
        self.label = "default"
        self.weights = spec.weights
        self._decoder = msgspec.json.Decoder(ChatRequest)

    def build_app(self) -> web.Application:
        """The application, ready to be run."""
        app = web.Application(middlewares=[_answer_errors], client_max_size=16 * 2**20)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.post("/collective_rpc", self.collective_rpc),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.get("/is_paused", self.is_paused),
                web.post("/abort_requests", self.abort_requests),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                web.post("/update_weight_version", self.update_weight_version),
                web.get("/weight_info", self.weight_info),
                web.get("/server_info", self.server_info),
            ]
        )
        return app

    async def complete(self, body: bytes) -> bytes:
        """Answer a chat request, both as JSON; RequestError if it cannot be answered."""
        asked = decode_body(body, self._decoder)
        prompt, sampling = read_request(asked, model=self.spec.model, max_model_len=self.spec.max_model_len)
        completion = await self.engine.generate(prompt, sampling)
        return msgspec.json.encode(describe_completion(asked, completion))

    async def chat(self, request: web.Request) -> web.Response:
        return web.Response(body=await self.complete(await request.read()), content_type="application/json")

    async def models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.spec.model,
            "object": "model",
            "owned_by": "orchestrator",
            "max_model_len": self.spec.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        engine = self.engine
        samples = (
            ("num_requests_running", "gauge", engine.running),
            ("num_requests_waiting", "gauge", engine.waiting),
            # There is no cache: how much of the batch is in use stands for it. Nothing is ever preempted.
            ("kv_cache_usage_perc", "gauge", min(1.0, engine.running / engine.max_batch)),
            ("num_preemptions_total", "counter", 0),
            ("prompt_tokens_total", "counter", engine.prompt_tokens),
            ("generation_tokens_total", "counter", engine.generated_tokens),
        )
        lines = []
        for name, kind, value in samples:
            lines.append(f"# TYPE vllm:{name} {kind}")
            lines.append(f'vllm:{name}{{engine="0",model_name="{self.spec.model}"}} {float(value)}')
        return web.Response(text="\n".join(lines) + "\n")

    async def collective_rpc(self, request: web.Request) -> web.Response:
        rpc = decode_body(await request.read(), msgspec.json.Decoder(RpcRequest))
        if rpc.method != "reload_weights":
            raise RequestError(
                400, "BadRequestError", f'unknown method "{rpc.method}"; known: reload_weights'
            )
        path = rpc.kwargs.get("weights_path", self.weights)
        if not isinstance(path, str):
            raise RequestError(400, "BadRequestError", "kwargs.weights_path must name a folder with weights")
        try:
            policy = await asyncio.to_thread(load_policy, Path(path))
        except WeightsError as error:
            raise RequestError(400, "BadRequestError", str(error)) from error
        self.engine.policy = policy
        self.weights = path
        return _json({"results": [None]})

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", PauseMode.ABORT)
        if mode not in list(PauseMode):
            raise RequestError(
                400, "BadRequestError", f"mode must be one of {', '.join(PauseMode)}; got {mode!r}"
            )
        await self.engine.pause(PauseMode(mode))
        return _json({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self.engine.resume()
        return _json({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return _json({"is_paused": self.engine.paused})

    async def abort_requests(self, request: web.Request) -> web.Response:
        self.engine.abort()
        return web.Response()

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        return web.Response()

    async def update_weight_version(self, request: web.Request) -> web.Response:
        self.label = decode_body(await request.read(), msgspec.json.Decoder(VersionRequest)).new_version
        return _json({"success": True, "new_version": self.label})

    async def weight_info(self, request: web.Request) -> web.Response:
        return _json({"weight_version": self.label})

    async def server_info(self, request: web.Request) -> web.Response:
        model = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
        return _json({"vllm_config": {"model_config": model}})


def reserve_port(host: str = "127.0.0.1") -> socket.socket:
    """A bound socket that never listens: its port is free for a child with `reuse_port`, and for nobody else.

    So a parent knows the address of a server before it starts it, without two of them picking the same port.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((host, 0))
    return reserved


@asynccontextmanager
async def run_policy_server(
    port: int = 0, *, model: str = "local", seed: int = 0, latency_s: float = 0.0, weights: str | None = None
) -> AsyncIterator[str]:
    """Serve a policy in this event loop; yields the base URL, with its /v1."""
    async with serve(
        PolicyServerSpec(port=port, model=model, seed=seed, latency_s=latency_s, weights=weights)
    ) as base_url:
        yield base_url


@asynccontextmanager
async def serve(spec: PolicyServerSpec) -> AsyncIterator[str]:
    """Serve what a spec says; yields the base URL."""
    policy = load_policy(Path(spec.weights)) if spec.weights else Policy()
    engine = Engine(policy, seed=spec.seed, latency_s=spec.latency_s, max_batch=spec.max_num_seqs)
    runner = web.AppRunner(
        PolicyServer(spec, engine).build_app(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        listening = await asyncio.get_running_loop().create_server(
            runner.server, spec.host, spec.port, backlog=1024, reuse_port=spec.reuse_port or None
        )
        try:
            port = listening.sockets[0].getsockname()[1]
            async with asyncio.TaskGroup() as tasks:
                decoding = tasks.create_task(engine.run())
                try:
                    yield f"http://{spec.host}:{port}/v1"
                finally:
                    # Whoever still waits gets an answer, so that closing need not wait for them.
                    engine.abort()
                    decoding.cancel()
        finally:
            await stop_listening(listening)
    finally:
        await runner.cleanup()


@web.middleware
async def _answer_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Errors of a request in OpenAI's form."""
    try:
        response: web.StreamResponse = await handler(request)
    except RequestError as error:
        return _error(error.status, error.kind, str(error))
    except web.HTTPException as error:
        return _error(error.status, error.reason.replace(" ", ""), error.reason)
    return response


def _error(status: int, kind: str, message: str) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status)


def _json(content: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


async def _serve_until_parent_ends(spec: PolicyServerSpec, lifeline: Lifeline) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    lifeline.watch(lambda: loop.call_soon_threadsafe(ended.set), kill_after_s=2 * _SHUTDOWN_S)
    async with serve(spec) as base_url:
        print(msgspec.json.encode({"base_url": base_url}).decode(), flush=True)
        await ended.wait()


def main() -> None:
    """Entry point of the child process."""
    spec, lifeline = read_spec(PolicyServerSpec)
    with suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_parent_ends(spec, lifeline))


if __name__ == "__main__":
    main()
