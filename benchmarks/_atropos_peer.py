"""The peer: Atropos' own rule for batches, and its API server, fed and asked as its environments and trainers do.

Runs inside the library's virtualenv. A group is posted as JSON under gzip, as its environments post it; a batch is
asked for with requests and made into arrays. The bodies are made before anything is measured.
"""

# Its library is only in a virtualenv of its own.
# mypy: ignore-errors

import contextlib
import gzip
import json
import os
import random
import socket
import subprocess
import sys
import time

import numpy as np
import requests
from atroposlib.api.utils import grab_batch_with_minimum_allocations
from cpu_time import cpu_s

START_S = 60


def form(asked: dict) -> dict[str, float]:
    """Mean CPU milliseconds of forming a batch, the queue kept at its length."""
    envs = [
        {"connected": True, "registered_id": name, "min_batch_allocation": asked["minimums"].get(name)}
        for name in asked["envs"]
    ]
    draws = iter(asked["draws"])
    queue = [group(*next(draws)) for _ in range(asked["queued"])]
    spent = 0.0
    for _ in range(asked["batches"]):
        before = time.process_time()
        batch, queue = grab_batch_with_minimum_allocations(queue, asked["batch_size"], envs)
        spent += time.process_time() - before
        queue += [group(*next(draws)) for _ in range(len(batch) if batch else 1)]
    return {"ms": spent / asked["batches"] * 1e3}


def missed(asked: dict) -> dict[str, float]:
    """Of queues that hold a batch, in how many none is found."""
    envs = [
        {"connected": True, "registered_id": name, "min_batch_allocation": asked["minimums"].get(name)}
        for name in asked["envs"]
    ]
    found = [
        grab_batch_with_minimum_allocations([group(*draw) for draw in queue], asked["batch_size"], envs)[0]
        for queue in asked["queues"]
    ]
    return {"missed": sum(batch is None for batch in found)}


def group(env: str, size: int) -> dict:
    return {"env_id": env, "tokens": [[1]] * size}


def deliver(asked: dict) -> dict[str, float]:
    """Seconds from asking to arrays, and CPU seconds of the server to take groups in and to give the batch."""
    rng = random.Random(0)
    size, tokens = asked["group_size"], asked["tokens"]
    bodies = [body(rng, size, tokens) for _ in range(4)]
    with api() as (url, server), requests.Session() as session:
        registration = {
            "wandb_group": "b", "wandb_project": "b", "batch_size": asked["sequences"], "max_token_len": tokens + 1,
            "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 100,
        }  # fmt: skip
        session.post(f"{url}/register", json=registration).raise_for_status()
        session.get(f"{url}/batch").raise_for_status()
        env = {"max_token_length": tokens + 1, "desired_name": "b", "weight": 1.0, "group_size": size}
        env_id = session.post(f"{url}/register-env", json=env).json()["env_id"]
        assert env_id == 0
        before = cpu_s(server)
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        for number in range(asked["sequences"] // size):
            data = bodies[number % len(bodies)]
            session.post(f"{url}/scored_data", data=data, headers=headers).raise_for_status()
        between, began = cpu_s(server), time.perf_counter()
        batch = session.get(f"{url}/batch").json()["batch"]
        for item in batch:
            for ids, mask, logprobs in zip(
                item["tokens"], item["masks"], item["inference_logprobs"], strict=True
            ):
                np.array(ids, np.int32), np.array(mask, np.int32), np.array(logprobs, np.float32)
        took = time.perf_counter() - began
        assert sum(len(item["tokens"]) for item in batch) == asked["sequences"]
        return {"wall_s": took, "in_s": between - before, "out_s": cpu_s(server) - between}


def body(rng: random.Random, size: int, tokens: int) -> bytes:
    """A group as an environment posts it, each sequence of half to all of `tokens`."""
    ids = [[rng.randrange(150_000) for _ in range(rng.randint(tokens // 2, tokens))] for _ in range(size)]
    payload = {
        "tokens": ids,
        "masks": ids,
        "scores": [rng.random() for _ in range(size)],
        "inference_logprobs": [[-rng.random() for _ in one] for one in ids],
        "env_id": 0,
    }
    return gzip.compress(json.dumps(payload).encode())


@contextlib.contextmanager
def api():
    """Its API server, started by its own command, and the process' id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-P",
        "-m",
        "atroposlib.cli.run_api",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_S
        try:
            while True:
                with contextlib.suppress(requests.ConnectionError):
                    requests.get(f"{url}/info", timeout=5).raise_for_status()
                    break
                assert process.poll() is None, "its server ended"
                assert time.monotonic() < until, "its server did not start"
                time.sleep(0.1)
            yield url, process.pid
        finally:
            process.kill()


def main() -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    answer = {"form": form, "missed": missed, "deliver": deliver}[asked["what"]](asked)
    print(json.dumps(answer), file=channel, flush=True)


if __name__ == "__main__":
    main()
