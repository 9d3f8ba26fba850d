"""An env server that speaks the wire by hand, and badly: `python -m tests.integration.hostile_server BEHAVIOUR [CAPACITY]`.

It prints its address and serves until its standard input ends.
"""

import os
import random
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from envs import wire
from tests.integration.server_envs import fixed_rollout

IDENTITY = "elsewhere:Hostile"
STATS = wire.ServerStats(0, 0, 0, 0, 0.0, 0)

Answers = list[list[bytes]]


def well(request: wire.Request, reward: float | None = None) -> list[bytes]:
    """The frames of a good result."""
    rollouts = [fixed_rollout(request.index, reward=reward or random.random()) for _ in range(request.count)]
    return wire.encode_result(request.id, rollouts)


def failure(request: wire.Request, **fields: Any) -> list[bytes]:
    """The frame of a failure."""
    values = {"id": request.id, "kind": "error", "message": "no", "retryable": False, **fields}
    return [wire.encode(wire.Failure(**values))]


def with_header(request: wire.Request, **fields: Any) -> list[bytes]:
    """A result with a rollout header whose fields are changed, as no careful server would send it."""
    frames = well(request)
    header = msgspec.msgpack.decode(frames[0])
    for rollout in header["rollouts"]:
        rollout.update(fields)
    return [msgspec.msgpack.encode(header), *frames[1:]]


def with_frame(request: wire.Request, number: int, frame: bytes) -> list[bytes]:
    """A result one of whose frames is another."""
    frames = well(request)
    frames[number] = frame
    return frames


def garbage(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(rng.randrange(60)) for _ in range(rng.choice([1, 1, 1, 2, 5, 9]))]


class HostileServer:
    """Answers hellos and pings like any other, and requests by `behave`; subclasses do worse."""

    def __init__(self, behave: Callable[["HostileServer", wire.Request], Answers]) -> None:
        self._behave = behave
        self.rng = random.Random(3)
        self.requests = 0
        self.held: list[wire.Request] = []
        self.capacity = 64
        self.mute = False
        self.reconnects = False
        self.leaves = False
        self.on_cancel: Callable[[int], Answers] = lambda _: []
        self.greeting: Callable[[wire.Hello], Answers] = self._greet
        self._context = zmq.Context()
        self._socket = self._open("tcp://127.0.0.1:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _open(self, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(address)
        return socket

    def _greet(self, hello: wire.Hello) -> Answers:
        return [[wire.encode(wire.Welcome(wire.PROTOCOL, hello.env, 1, "here"))], [self.ready(hello)]]

    def ready(self, hello: wire.Hello) -> bytes:
        """The declaration, with whatever capacity is set."""
        declared = {
            "type": "ready",
            "env": hello.env,
            "tasks": dict.fromkeys(hello.splits),
            "group_scored": False,
            "capacity": self.capacity,
        }
        return msgspec.msgpack.encode(declared)

    def serve(self) -> None:
        """For ever."""
        while True:
            route, *frames = self._socket.recv_multipart()
            for answer in self._answers(wire.decode_to_server(frames)):
                self._socket.send_multipart([route, *answer])
            if self.leaves:
                self._socket.close(0)
                return
            if self.reconnects and self.requests:
                self.requests = 0
                self._socket.close(0)
                self._socket = self._reopen()

    def _reopen(self) -> "zmq.Socket[bytes]":
        while True:
            try:
                return self._open(self.address)
            except zmq.ZMQError:
                time.sleep(0.01)

    def _answers(self, message: wire.ToServer) -> Answers:
        if isinstance(message, wire.Hello):
            return self.greeting(message)
        if self.mute:
            return []
        if isinstance(message, wire.Ping):
            return [[wire.encode(wire.Pong(message.sent, STATS))]]
        if isinstance(message, wire.Request):
            self.requests += 1
            return self._behave(self, message)
        if isinstance(message, wire.Cancel):
            return self.on_cancel(message.id)
        return []


def _hold(server: HostileServer, request: wire.Request) -> Answers:
    server.held.append(request)
    return []


def _mute(server: HostileServer, _: wire.Request) -> Answers:
    server.mute = True
    return []


def _leave(server: HostileServer) -> Answers:
    server.leaves = True
    return []


def _refuse(server: HostileServer, *, protocol: int = wire.PROTOCOL) -> Answers:
    """From now on nobody is let in, not even who comes back."""
    refusal = [wire.encode(wire.Refused(protocol, "go away"))]
    server.greeting = lambda hello: [refusal]
    return [refusal]


def _become_another(server: HostileServer) -> Answers:
    """Whoever comes back finds another environment."""
    server.greeting = lambda hello: [
        [wire.encode(wire.Welcome(wire.PROTOCOL, "other:Env", 1, "here"))],
        [server.ready(msgspec.structs.replace(hello, env="other:Env"))],
    ]
    return [[wire.encode(wire.Expired())]]


def _unknown_ids(server: HostileServer, request: wire.Request) -> Answers:
    strangers = [msgspec.structs.replace(request, id=request.id + 10_000 + n) for n in range(100)]
    return [*map(well, strangers), well(request)]


def _slowly(request: wire.Request) -> Answers:
    time.sleep(0.2)
    return [well(request)]


def with_arrays(
    request: wire.Request,
    *,
    token: int | None = None,
    logprob: float | None = None,
    mask: bytes | None = None,
) -> list[bytes]:
    """A result one of whose arrays holds nothing but this."""
    arrays = well(request)[1]
    count = len(arrays) // 9
    tokens, logprobs, masks = arrays[: 4 * count], arrays[4 * count : 8 * count], arrays[8 * count :]
    if token is not None:
        tokens = struct.pack("<i", token) * count
    if logprob is not None:
        logprobs = struct.pack("<f", logprob) * count
    if mask is not None:
        masks = mask * count
    return with_frame(request, 1, tokens + logprobs + masks)


BEHAVIOURS: dict[str, Callable[[HostileServer, wire.Request], Answers]] = {
    "well": lambda _, request: [well(request)],
    "unknown_ids": _unknown_ids,
    "every_result_three_times": lambda _, request: [well(request)] * 3,
    "a_result_and_a_failure": lambda _, request: [well(request), failure(request)],
    "wrong_count": lambda _, request: [well(msgspec.structs.replace(request, kind="group", count=3))],
    "garbage": lambda server, _: [garbage(server.rng) for _ in range(50)],
    "huge_header": lambda _, request: [with_header(request, stop_reason="x" * (wire.MAX_HEADER_BYTES + 1))],
    "huge_frame": lambda _, request: [with_frame(request, 1, bytes(20_000_000))],
    "nan_reward": lambda _, request: [with_header(request, reward=float("nan"))],
    "largest_reward": lambda _, request: [with_header(request, reward=1e308)],
    "text_reward": lambda _, request: [with_header(request, reward="good")],
    "negative_lengths": lambda _, request: [with_header(request, lengths=[-8])],
    "endless_lengths": lambda _, request: [with_header(request, lengths=[2**31 - 1] * 1000)],
    "no_sequences": lambda _, request: [with_header(request, lengths=[])],
    "wrong_mask": lambda _, request: [with_arrays(request, mask=b"\x02")],
    "empty_mask": lambda _, request: [with_arrays(request, mask=b"\x00")],
    "short_frames": lambda _, request: [with_frame(request, 1, b"abc")],
    "positive_logprobs": lambda _, request: [with_arrays(request, logprob=0.5)],
    "nan_logprobs": lambda _, request: [with_arrays(request, logprob=float("nan"))],
    "negative_tokens": lambda _, request: [with_arrays(request, token=-5)],
    "no_transcripts": lambda _, request: [with_frame(request, 2, b"\xc1\xff")],
    "endless_transcripts": lambda _, request: [with_frame(request, 2, b"\x91" * 100_000)],
    "few_frames": lambda _, request: [well(request)[:2]],
    "many_frames": lambda _, request: [well(request) * 20],
    "never_answers": lambda server, request: _hold(server, request),
    "falls_silent": lambda server, request: _mute(server, request),
    "new_kinds": lambda server, request: [failure(request, kind=f"kind {server.rng.random()}")],
    "long_failures": lambda server, request: [
        failure(
            request, kind=f"kind {server.rng.random()}", message="x" * 1_000_000, detail="y\n" * 1_000_000
        )
    ],
    "says_that_it_is_lost": lambda _, request: [failure(request, kind=wire.SERVER_LOST, inflight=5)],
    "new_metrics": lambda server, request: [with_header(request, metrics={f"m{server.rng.random()}": 1.0})],
    "expired": lambda _, __: [[wire.encode(wire.Expired())]],
    "drained": lambda _, request: [[wire.encode(wire.Drained())], well(request)],
    "reconnects": lambda _, request: [well(request)],
    "answers_the_cancelled": lambda server, request: _hold(server, request),
    "ready_again_and_again": lambda _, request: [well(request)],
    "leaves_for_good": lambda server, _: _leave(server),
    "refuses_after_a_while": lambda server, _: _refuse(server),
    "another_protocol_after_a_while": lambda server, _: _refuse(server, protocol=99),
    "welcomes_in_another_protocol": lambda _, __: [[wire.encode(wire.Welcome(99, "e", 1, "here"))]],
    "another_env_after_a_while": lambda server, _: _become_another(server),
    "slow": lambda _, request: _slowly(request),
    "never_ready": lambda _, request: [well(request)],
}
"""What becomes of a request, by the name of the behaviour."""


def hostile_server(behaviour: str) -> HostileServer:
    """A server with one of the behaviours."""
    server = HostileServer(BEHAVIOURS[behaviour])
    if behaviour == "reconnects":
        server.reconnects = True
    elif behaviour == "answers_the_cancelled":
        server.on_cancel = lambda number: [well(one) for one in server.held if one.id == number]
    elif behaviour == "ready_again_and_again":
        greet = server.greeting
        server.greeting = lambda hello: greet(hello) * 20
    elif behaviour == "never_ready":
        welcome = server.greeting
        server.greeting = lambda hello: welcome(hello)[:1]
    return server


if __name__ == "__main__":
    made = hostile_server(sys.argv[1])
    if len(sys.argv) > 2:
        made.capacity = int(sys.argv[2])
    print(made.address, flush=True)  # noqa: T201  how the test learns it
    threading.Thread(target=made.serve, daemon=True).start()
    sys.stdin.read()
    # The thread is in the middle of whatever it does.
    os._exit(0)
