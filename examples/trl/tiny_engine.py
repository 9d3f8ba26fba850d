"""Serves a model folder as vLLM does, slowly, on a machine without a GPU: `tiny_engine.py FOLDER [--port N]`.

Chat completions with token ids and log-probabilities, and the calls by which the orchestrator loads weights. An answer is
sampled whole by one version of the weights, because loading waits for it. In place of this start a real engine:
VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER.
"""

import argparse
import asyncio
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer


class TinyEngine:
    """A model, and the label of its weights."""

    def __init__(self, folder: str, name: str) -> None:
        self._name = name
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = load(folder)
        self._label = "default"
        self._one_at_a_time = asyncio.Lock()

    def build_app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat),
                web.get("/v1/models", self.models),
                web.get("/health", self.nothing),
                web.post("/pause", self.nothing),
                web.post("/resume", self.nothing),
                web.get("/is_paused", self.is_paused),
                web.post("/collective_rpc", self.reload),
                web.post("/update_weight_version", self.set_label),
                web.get("/weight_info", self.label),
            ]
        )
        return app

    async def chat(self, request: web.Request) -> web.Response:
        asked = await request.json()
        prompt = self._tokenizer.apply_chat_template(asked["messages"], tokenize=True, return_dict=False)
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or 16
        heat = 1.0 if asked.get("temperature") is None else asked["temperature"]
        async with self._one_at_a_time:
            tokens, logprobs = await asyncio.to_thread(self._generate, prompt, limit, heat)
        ended = bool(tokens) and tokens[-1] == self._tokenizer.eos_token_id
        names = self._tokenizer.convert_ids_to_tokens(tokens)
        content = [
            {"token": token, "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(names, logprobs, strict=True)
        ]
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop" if ended else "length",
            "logprobs": {"content": content},
            "token_ids": tokens,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        answer = {"id": "chat", "object": "chat.completion", "model": self._name, "choices": [choice]}
        return web.json_response({**answer, "usage": usage, "prompt_token_ids": prompt})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def nothing(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": False})

    async def reload(self, request: web.Request) -> web.Response:
        folder = (await request.json())["kwargs"]["weights_path"]
        try:
            model = await asyncio.to_thread(load, folder)
        except (OSError, ValueError, RuntimeError) as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        async with self._one_at_a_time:
            self._model = model
        return web.json_response({"results": [None]})

    async def set_label(self, request: web.Request) -> web.Response:
        self._label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def label(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._label})

    @torch.no_grad()
    def _generate(self, prompt: list[int], limit: int, heat: float) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        logprobs: list[float] = []
        cache: Any = None
        fresh = prompt
        while len(tokens) < limit:
            out = self._model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            distribution = torch.log_softmax(out.logits[0, -1].float() / heat, dim=-1)
            token = int(torch.multinomial(distribution.exp(), 1))
            tokens.append(token)
            logprobs.append(float(distribution[token]))
            if token == self._tokenizer.eos_token_id:
                break
            fresh = [token]
        return tokens, logprobs


def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def serve(folder: str, name: str, port: int) -> None:
    runner = web.AppRunner(TinyEngine(folder, name).build_app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--name", default="tiny", help="model.name of the orchestrator")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(serve(chosen.folder, chosen.name, chosen.port))


if __name__ == "__main__":
    main()
