"""The clients of a server: handshakes, leases, credit, and that every run is answered exactly once."""

from typing import Any

import pytest

from envs import wire
from envs.sessions import MAX_CLIENTS, ActiveRequest, Sessions, canonical_id


class Desk:
    """Sessions with what they sent and started."""

    def __init__(self, **options: Any) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.gone: set[bytes] = set()
        self.started: list[ActiveRequest] = []
        self.cancelled: list[int] = []
        defaults: dict[str, Any] = {"env": "reverse", "capacity": 4, "send": self._send, "start": self._start}
        self.sessions = Sessions(**(defaults | options))
        self.sessions.loaded(count_tasks=lambda split: 10, group_scored=False)

    def _send(self, route: bytes, frames: list[bytes]) -> bool:
        if route in self.gone:
            return False
        self.sent.append((route, wire.decode_to_client(frames)))
        return True

    def _start(self, active: ActiveRequest) -> None:
        active.cancel = lambda: self.cancelled.append(active.request.id)
        self.started.append(active)

    def say(self, message: wire.ToServer, *, route: bytes = b"a", now: float = 0.0) -> None:
        self.sessions.on_message(route, [wire.encode(message)], now=now, stats=self.stats)

    def stats(self) -> wire.ServerStats:
        return self.sessions.stats(loop_lag_s=0.0, rss_bytes=0)

    def hello(self, *, route: bytes = b"a", now: float = 0.0, **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "protocol": wire.PROTOCOL,
            "client": "me",
            "env": "reverse",
            "model": "m",
            "sampling": {},
            "splits": ["train"],
            "lease_s": 10.0,
        }
        self.say(wire.Hello(**(defaults | fields)), route=route, now=now)

    def run(self, run_id: int, *, route: bytes = b"a", count: int = 1, now: float = 0.0) -> None:
        self.say(
            wire.Request(run_id, "group" if count > 1 else "rollout", "train", 0, "u", count),
            route=route,
            now=now,
        )

    def heard(self, route: bytes = b"a") -> list[str]:
        return [type(message).__name__ for to, message in self.sent if to == route]

    def last(self) -> Any:
        return self.sent[-1][1]


def test_a_hello_is_welcomed_and_told_what_there_is() -> None:
    """And said again it changes nothing for what runs."""
    desk = Desk()
    desk.hello()
    assert desk.heard() == ["Welcome", "Ready"]
    assert desk.last() == wire.Ready("reverse", {"train": 10}, False, 4, models=True)
    desk.run(1)
    desk.hello()
    assert desk.heard() == ["Welcome", "Ready", "Welcome", "Ready"]
    assert desk.cancelled == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"protocol": 9}, "me speaks protocol 9, this server speaks 1 or 2"),
        ({"env": "larger"}, 'asks for environment "larger", this server has "reverse"'),
        ({"env": "::"}, 'asks for environment "::"'),
        ({"api_key_env": "HOME"}, "not allowed to use the API key in HOME"),
        ({"sampling": {"messages": []}}, "sampling must not set messages"),
    ],
)
def test_a_hello_that_cannot_be_served_is_refused_with_the_reason(
    fields: dict[str, Any], reason: str
) -> None:
    """Both sides are named, and no lease begins."""
    desk = Desk()
    desk.hello(**fields)
    assert isinstance(desk.last(), wire.Refused)
    assert reason in desk.last().reason
    desk.run(1)
    assert isinstance(desk.last(), wire.Expired)


def test_a_key_that_is_allowed_but_not_set_is_refused() -> None:
    """The variable is named, and looked up where the server runs."""
    desk = Desk(key_variables=["NO_SUCH_VARIABLE_HERE"])
    desk.hello(api_key_env="NO_SUCH_VARIABLE_HERE")
    assert "not set where this server runs" in desk.last().reason


def test_a_split_that_raises_is_refused_and_nothing_else_happens() -> None:
    """The environment's own code is asked for the number of tasks."""
    desk = Desk()

    def count_tasks(split: str) -> int | None:
        raise KeyError(split)

    desk.sessions.loaded(count_tasks=count_tasks, group_scored=False)
    desk.hello()
    assert desk.heard() == ["Welcome", "Refused"]


def test_a_run_is_answered_once_and_frees_its_room() -> None:
    """Capacity is per client, groups cost their count, and an idle client may have one larger group."""
    desk = Desk()
    desk.hello()
    desk.run(1, count=9)
    desk.run(2)
    assert (desk.last().kind, desk.last().retryable) == ("not_accepted", True)
    desk.sessions.on_done(desk.started[0], [wire.encode(wire.Failure(1, "error", "", False))], failed=True)
    desk.run(3)
    assert [active.request.id for active in desk.started] == [1, 3]
    assert (desk.sessions.done, desk.sessions.failed, desk.sessions.inflight) == (1, 1, 1)


def test_a_run_before_the_environment_is_loaded_is_not_accepted() -> None:
    """Alive is not ready."""
    sent: list[Any] = []

    def send(route: bytes, frames: list[bytes]) -> bool:
        sent.append(wire.decode_to_client(frames))
        return True

    sessions = Sessions(
        env="reverse",
        capacity=1,
        send=send,
        start=lambda active: None,
    )
    stats = sessions.stats(loop_lag_s=0, rss_bytes=0)
    for message in (wire.Hello(1, "me", "reverse", "m", {}), wire.Request(1, "rollout", "train", 0, "u")):
        sessions.on_message(b"a", [wire.encode(message)], now=0, stats=lambda: stats)
    assert [type(message).__name__ for message in sent] == ["Welcome", "Failure"]


def test_silence_ends_the_lease_and_cancels_what_runs() -> None:
    """A client that died without a word does not keep its rollouts, and every message renews."""
    desk = Desk()
    desk.hello(now=0.0)
    desk.run(1, now=5.0)
    desk.sessions.beat(now=14.0, stats=desk.stats())
    assert desk.cancelled == []
    desk.sessions.beat(now=15.0, stats=desk.stats())
    assert desk.cancelled == [1]
    desk.say(wire.Ping(1.0), now=16.0)
    assert isinstance(desk.last(), wire.Expired)


def test_a_connection_that_is_gone_ends_the_lease_at_the_next_beat() -> None:
    """The server's side of the heartbeat: what cannot be delivered shows that nobody is there."""
    desk = Desk()
    desk.hello()
    desk.run(1)
    desk.gone.add(b"a")
    desk.sessions.beat(now=1.0, stats=desk.stats())
    assert desk.cancelled == [1]
    desk.sessions.on_done(desk.started[0], [], failed=False)
    assert desk.sessions.inflight == 0


def test_a_client_that_comes_back_on_another_connection_replaces_itself() -> None:
    """What ran for the old connection is cancelled at once, not when its lease ends."""
    desk = Desk()
    desk.hello(route=b"a")
    desk.run(1, route=b"a")
    desk.hello(route=b"b")
    assert desk.cancelled == [1]
    desk.run(1, route=b"b")
    assert len(desk.started) == 2


def test_clients_do_not_disturb_each_other() -> None:
    """Ids, capacity and leases are per client; one leaving cancels only its own."""
    desk = Desk()
    desk.hello(route=b"a", client="one")
    desk.hello(route=b"b", client="two")
    desk.run(1, route=b"a", count=4)
    desk.run(1, route=b"b", count=4)
    assert len(desk.started) == 2
    desk.say(wire.Bye(), route=b"a")
    assert desk.cancelled == [1]
    desk.sessions.on_done(desk.started[1], [wire.encode(wire.Failure(1, "error", "", False))], failed=True)
    assert desk.heard(b"b")[-1] == "Failure"


def test_the_number_of_clients_is_bounded() -> None:
    """The one too many is refused; the others stay."""
    desk = Desk()
    for number in range(MAX_CLIENTS + 1):
        desk.hello(route=b"%d" % number, client=f"c{number}")
    assert f"{MAX_CLIENTS} clients" in desk.last().reason


def test_cancelling_is_idempotent_and_answered_once() -> None:
    """A second cancel would hit the clean-up of the first; an unknown id is harmless."""
    desk = Desk()
    desk.hello()
    desk.run(1)
    for run_id in (1, 1, 99):
        desk.say(wire.Cancel(run_id))
    assert desk.cancelled == [1]
    # The environment swallowed the cancellation and handed in a result all the same.
    desk.sessions.on_done(desk.started[0], [b"a result"], failed=False)
    assert (desk.last().kind, desk.last().id) == ("cancelled", 1)


def test_stopping_answers_everything_as_retryable() -> None:
    """A server that is told to end loses nobody's request."""
    desk = Desk()
    desk.hello()
    desk.run(1)
    desk.sessions.stop()
    desk.run(2)
    assert desk.last().kind == "not_accepted"
    desk.sessions.on_done(desk.started[0], [], failed=False)
    assert [type(message).__name__ for _, message in desk.sent[-2:]] == ["Failure", "Drained"]
    assert (desk.sent[-2][1].kind, desk.sent[-2][1].retryable) == ("server_stopping", True)


def test_nothing_is_begun_for_a_client_that_comes_while_the_server_stops() -> None:
    """Its environment is being closed: what it would make of the rollout is not the rollout's fault."""
    desk = Desk()
    desk.sessions.stop()
    desk.hello()
    desk.run(1)
    assert desk.started == []
    assert (desk.last().kind, desk.last().retryable) == ("not_accepted", True)


def test_a_malformed_message_is_counted_and_its_run_fails() -> None:
    """Garbage is dropped; a run that makes no sense is answered; another version's hello is refused."""
    desk = Desk()
    desk.hello()
    bad = wire.encode(wire.Request(7, "rollout", "train", 0, "u", timeout_s=-1))
    old = b"\x82\xa4type\xa5hello\xa8protocol\x63"
    for frames in ([b"\xc1"], [bad], [old], []):
        desk.sessions.on_message(b"a", frames, now=0, stats=desk.stats)
    assert desk.sessions.malformed == 4
    assert (desk.sent[-2][1].kind, desk.sent[-2][1].id) == ("malformed_request", 7)
    assert "speaks protocol 99" in desk.sent[-1][1].reason


@pytest.mark.parametrize(
    ("env", "canonical"),
    [("reverse", "builtin::reverse"), ("a::b@eval", "a::b"), ("mod:Class", "mod:Class"), ("", "")],
)
def test_ids_are_compared_in_full_and_without_their_split(env: str, canonical: str) -> None:
    """Two spellings of one environment are one environment."""
    assert canonical_id(env) == canonical
