"""An inference server that answers at once and always the same, so that only the hosting is measured."""

import asyncio
import json

from aiohttp import web

PROMPT_TOKENS, SAMPLED_TOKENS = 512, 1536

_ANSWER = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "prompt_token_ids": list(range(1000, 1000 + PROMPT_TOKENS)),
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "drow"},
                "finish_reason": "stop",
                "token_ids": list(range(2000, 2000 + SAMPLED_TOKENS)),
                "logprobs": {
                    "content": [
                        {"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}
                        for _ in range(SAMPLED_TOKENS)
                    ]
                },
            }
        ],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": SAMPLED_TOKENS,
            "total_tokens": PROMPT_TOKENS + SAMPLED_TOKENS,
        },
    }
).encode()


async def chat(request: web.Request) -> web.Response:
    """The same answer to everything."""
    await request.read()
    return web.Response(body=_ANSWER, content_type="application/json")


async def main() -> None:
    """Print the address and serve until killed."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
