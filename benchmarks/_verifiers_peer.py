"""The peer: the same environment under classic verifiers' own ZMQ server, asked by its own client.

Runs inside the library's virtualenv. Reads one number of rollouts per line and answers each with one line of
JSON: wall time, CPU time of this process (the client) and of the server's processes.
"""

# Its library is only in a virtualenv of its own.
# mypy: ignore-errors

import asyncio
import json
import os
import sys
import time

import uvloop
import verifiers as vf
from cpu_time import cpu_s
from verifiers.types import ClientConfig

INFLIGHT = 128


async def measure(env, config: ClientConfig, rollouts: int) -> dict[str, float]:
    rows = env.get_dataset()
    inputs = [dict(rows[index % len(rows)]) for index in range(rollouts)]
    sampling = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    pending = iter(inputs)

    async def worker() -> None:
        for row in pending:
            output = await env.run_rollout(row, config, "policy", sampling, state_columns=["trajectory"])
            tokens = output["trajectory"][0]["tokens"]
            assert len(tokens["prompt_ids"]) + len(tokens["completion_ids"]) == len(
                tokens["prompt_mask"] + tokens["completion_logprobs"]
            )

    server = env.env_server_process.pid
    wall, cpu, server_cpu = time.perf_counter(), time.process_time(), cpu_s(server)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(INFLIGHT, rollouts)):
            tasks.create_task(worker())
    return {
        "wall_s": time.perf_counter() - wall,
        "client_s": time.process_time() - cpu,
        "server_s": cpu_s(server) - server_cpu,
    }


async def main() -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    url = sys.argv[1]
    os.environ["BENCH_KEY"] = "EMPTY"
    env = vf.load_environment("reverse_words")
    config = ClientConfig(
        client_type="openai_chat_completions", api_base_url=url, api_key_var="BENCH_KEY", max_connections=4096
    )
    await env.start_server(num_workers=1, log_level="ERROR", console_logging=False)
    loop = asyncio.get_running_loop()
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await measure(env, config, int(line))), file=channel, flush=True)
    finally:
        await env.stop_server()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
