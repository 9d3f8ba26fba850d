"""Many env servers in one process, which only wait: `python -m benchmarks._stub_servers DIRECTORY FIRST COUNT LATENCY_S`.

Each listens at a socket of its own in the directory, speaks the wire of env servers, and answers every request after
`LATENCY_S`, give or take half of it. Three more numbers: the tokens of a rollout, how many rollouts a server takes at once, and
the bytes of a transcript; with the last one latencies are exponential around their mean, so that rollouts end at a steady pace from
the beginning.
"""

import asyncio
import random
import sys

import numpy as np
import uvloop
import zmq

from envs import Rollout, Sequence, wire
from envs.drained import DrainedSocket

ENV = "stub:Env"
CAPACITY = 256


class StubServer:
    """One of them."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        latency_s: float,
        tokens: int,
        capacity: int,
        transcript_bytes: int,
        *,
        exponential: bool,
    ) -> None:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(address)
        self._loop = asyncio.get_running_loop()
        self._latency_s = latency_s
        self._socket = DrainedSocket(socket, self._on_frames, loop=self._loop)
        ids, logprobs = np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32)
        sequence = Sequence(ids, np.ones(tokens, np.uint8), logprobs)
        said = (
            [{"role": "assistant", "content": "word " * (transcript_bytes // 5)}] if transcript_bytes else []
        )
        self._rollouts = [Rollout([sequence], reward=float(right), messages=said) for right in (0, 1)]
        self._capacity = capacity
        self._exponential = exponential

    def _on_frames(self, frames: list[bytes]) -> None:
        route, message = frames[0], wire.decode_to_server(frames[1:])
        if isinstance(message, wire.Request):
            pause_s = self._latency_s * (
                random.expovariate(1.0) if self._exponential else random.uniform(0.5, 1.5)
            )
            self._loop.call_later(pause_s, self._answer, route, message)
        elif isinstance(message, wire.Hello):
            self._say(route, wire.Welcome(wire.PROTOCOL, ENV, 0, ""))
            self._say(route, wire.Ready(ENV, {"train": None}, False, self._capacity))
        elif isinstance(message, wire.Ping):
            self._say(route, wire.Pong(message.sent, wire.ServerStats(0, 0, 0, 0, 0.0, 0)))

    def _answer(self, route: bytes, asked: wire.Request) -> None:
        rollouts = [self._rollouts[asked.index % 2]] * asked.count
        self._socket.send([route, *wire.encode_result(asked.id, rollouts)])

    def _say(self, route: bytes, message: wire.ToClient) -> None:
        self._socket.send([route, wire.encode(message)])


async def main(
    directory: str,
    first: int,
    count: int,
    latency_s: float,
    tokens: int = 64,
    capacity: int = CAPACITY,
    transcript_bytes: int | None = None,
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    servers = [
        StubServer(
            context,
            f"ipc://{directory}/{number}",
            latency_s,
            tokens,
            capacity,
            transcript_bytes or 0,
            exponential=transcript_bytes is not None,
        )
        for number in range(first, first + count)
    ]
    print(len(servers), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[5:]]
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), *numbers))
