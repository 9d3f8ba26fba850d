"""Random and spoiled messages: none raises, and a rank is served as if they had not come."""

import random

import msgspec

from orchestrator.groups.group import Batch
from orchestrator.trainer.protocol import (
    PROTOCOL,
    Ack,
    Done,
    Get,
    Join,
    Leave,
    Next,
    Ok,
    Ping,
    Publish,
    Report,
    ToTrainer,
    Updated,
    Updating,
    Welcome,
    encode,
)
from orchestrator.trainer_link.ranks import Rank
from tests.support.journal_groups import make_batch
from tests.support.trainer_links import make_leases

MESSAGES = 20_000
TOKEN = "only ranks know it"


class Sink:
    """A transport that keeps the last answers only."""

    def __init__(self) -> None:
        self.last: ToTrainer | None = None
        self.served: list[tuple[int, int]] = []

    def send(self, peer: bytes, message: ToTrainer) -> None:
        self.last = message

    def serve(self, rank: Rank, request_id: int, step: int, batch: Batch | None) -> None:
        self.served.append((rank.number, step))


def spoil(rng: random.Random, frame: bytes) -> bytes:
    """Change, cut, repeat or insert some bytes."""
    data = bytearray(frame)
    for _ in range(rng.choice([0, 1, 1, 2, 8])):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0 if place < len(data):
                data[place] = rng.randrange(256)
            case 1:
                del data[place : place + rng.randrange(1, 8)]
            case 2:
                data[place:place] = rng.randbytes(rng.randrange(1, 8))
            case _:
                data[place:place] = data[: rng.randrange(1, 16)]
    return bytes(data)


def any_number(rng: random.Random) -> int:
    return rng.choice([-(2**63), -1, 0, 1, 2, 3, 2**31, 2**53, 2**53 + 1, 2**63, 2**64 - 1])


def any_frame(rng: random.Random) -> bytes:
    """Bytes, a map with wild values, or a message that was spoiled, mostly."""
    wild = any_number(rng)
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.randrange(60))
    if kind == 1:
        names = ["type", "id", "step", "after", "version", "path", "rank", "token", "protocol"]
        values: list[object] = [
            "join",
            "ack",
            "publish",
            None,
            True,
            1.5,
            [],
            {},
            wild,
            "x" * rng.choice([0, 5000]),
        ]
        return msgspec.msgpack.encode({rng.choice(names): rng.choice(values) for _ in range(6)})
    if kind == 2:
        return b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * rng.choice([10, 1000, 60_000])
    messages = [
        Join(PROTOCOL, rng.randrange(4), 2, f"client{rng.randrange(8)}"),
        Next(wild, any_number(rng)),
        Get(wild, any_number(rng)),
        Ack(wild, any_number(rng)),
        Publish(wild, any_number(rng), rng.choice([None, "p", "x" * 5000]), any_number(rng)),
        Updating(wild, any_number(rng)),
        Updated(wild, any_number(rng), any_number(rng), failed=rng.choice(["", "no", "x" * 5000])),
        Report(wild, any_number(rng), {rng.choice(["loss", "x" * 99]): rng.choice([0.5, float("nan")])}),
        Done(wild),
        Ping(),
        Leave(),
    ]
    return spoil(rng, msgspec.msgpack.encode(rng.choice(messages)))


def test_random_messages_raise_nothing_and_a_rank_is_served_afterwards() -> None:
    """Without the token they change nothing either."""
    rng = random.Random(11)
    sink, events = Sink(), list[str]()
    leases = make_leases(
        sink,
        world_size=2,
        token=TOKEN,
        on_rank_ack=lambda step, rank: events.append("ack"),
        on_publish=lambda version, path: events.append("publish"),
        on_done=lambda: events.append("done"),
    )
    leases.offer(make_batch(1))
    for _ in range(MESSAGES):
        leases.receive(b"peer%d" % rng.randrange(5), [any_frame(rng)] * rng.choice([1, 1, 1, 1, 0, 2]))
    assert (events, sink.served, leases.ranks) == ([], [], [])
    assert leases.malformed > MESSAGES / 4
    leases.receive(b"real", [encode(Join(PROTOCOL, 0, 2, "real", token=TOKEN))])
    assert isinstance(sink.last, Welcome)
    leases.receive(b"real", [encode(Next(1, 0))])
    assert sink.served == [(0, 1)]
    leases.receive(b"real", [encode(Ack(2, 1))])
    assert isinstance(sink.last, Ok)


def test_random_messages_of_peers_that_may_join_raise_nothing_either() -> None:
    """They may do what a rank may, and connections come and go; the books still balance."""
    rng = random.Random(12)
    sink = Sink()
    leases = make_leases(sink, world_size=2, keep=2)
    step = 0
    for _ in range(MESSAGES):
        peer = b"peer%d" % rng.randrange(5)
        if rng.random() < 0.02:
            leases.lose(peer)
        if len(leases.leased) < 2:
            step += 1
            leases.offer(make_batch(step))
        leases.receive(peer, [any_frame(rng)])
        assert len(leases.ranks) == len(leases.peers) <= 2
    assert sink.served, "some of them were ranks"
    for rank in (0, 1):
        leases.receive(b"real%d" % rank, [encode(Join(PROTOCOL, rank, 2, f"real{rank}"))])
        assert isinstance(sink.last, Welcome)
        sink.served.clear()
        leases.receive(b"real%d" % rank, [encode(Get(1, leases.leased[0]))])
        assert sink.served == [(rank, leases.leased[0])]
