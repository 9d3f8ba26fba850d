"""Who gets which batch: leases, ranks and acknowledgements, message by message."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from orchestrator.errors import ConfigError
from orchestrator.groups.group import Batch
from orchestrator.trainer.protocol import (
    PROTOCOL,
    Ack,
    Done,
    Engines,
    Finished,
    Get,
    Join,
    Leave,
    Missing,
    Next,
    Ok,
    Ping,
    Pong,
    Publish,
    Published,
    Refused,
    Report,
    ToServer,
    ToTrainer,
    Unknown,
    Updated,
    Updating,
    Welcome,
    encode,
)
from orchestrator.trainer_link.encoding import check_shares
from orchestrator.trainer_link.ranks import Rank
from tests.support.journal_groups import make_batch
from tests.support.trainer_links import UpdatesAtOnce, make_leases


class Service:
    """A transport that keeps what it was told to do, and what the service behind the leases heard."""

    def __init__(self, world_size: int = 2, **options: Any) -> None:
        self.sent: list[tuple[bytes, ToTrainer]] = []
        self.served: list[tuple[bytes, int, int]] = []
        self.events: list[tuple[object, ...]] = []
        self.world_size = world_size
        self.leases = make_leases(
            self,
            world_size=world_size,
            run="r",
            on_ack=lambda step: self.events.append(("ack", step)),
            on_rank_ack=lambda step, rank: self.events.append(("rank_ack", step, rank)),
            on_publish=lambda version, path: self.events.append(("publish", version, path)),
            on_trained=lambda step: self.events.append(("trained", step)),
            on_done=lambda: self.events.append(("done",)),
            **options,
        )

    def send(self, peer: bytes, message: ToTrainer) -> None:
        self.sent.append((peer, message))

    def serve(self, rank: Rank, request_id: int, step: int, batch: Batch | None) -> None:
        assert batch is None or batch.step == step
        self.served.append((rank.peer, rank.number, step))

    def tell(self, peer: bytes, message: ToServer) -> ToTrainer | None:
        """Send a message; what is said back to this peer at once."""
        self.sent.clear()
        self.leases.receive(peer, [encode(message)])
        return next((answer for to, answer in reversed(self.sent) if to == peer), None)

    def get(self, rank: int, step: int) -> None:
        """Have a rank served with a step."""
        self.tell(b"peer%d" % rank, Get(1000, step))

    def join(self, rank: int, client: str | None = None, peer: bytes | None = None) -> ToTrainer | None:
        return self.tell(
            peer or b"peer%d" % rank, Join(PROTOCOL, rank, self.world_size, client or f"client{rank}")
        )


def test_a_batch_stays_leased_until_every_rank_has_acknowledged_it() -> None:
    """on_ack is called once, after the last rank."""
    service = Service()
    service.join(0)
    service.join(1)
    service.leases.offer(make_batch(1))
    service.get(0, 1)
    service.get(1, 1)
    assert service.tell(b"peer0", Ack(1, 1)) == Ok(1)
    assert service.leases.leased == [1]
    assert service.tell(b"peer1", Ack(2, 1)) == Ok(2)
    assert service.leases.leased == []
    assert service.events == [("rank_ack", 1, 0), ("rank_ack", 1, 1), ("ack", 1)]


def test_acknowledging_twice_is_harmless_and_said() -> None:
    """Before and after the other ranks have."""
    service = Service(world_size=1)
    service.join(0)
    service.leases.offer(make_batch(1))
    service.get(0, 1)
    service.tell(b"peer0", Ack(1, 1))
    assert service.tell(b"peer0", Ack(2, 1)) == Ok(2, "step 1 was acknowledged before")
    assert service.events == [("rank_ack", 1, 0), ("ack", 1)]


def test_a_step_that_does_not_exist_cannot_be_acknowledged() -> None:
    """A trainer with another run's state is told."""
    service = Service(world_size=1)
    service.join(0)
    assert isinstance(service.tell(b"peer0", Ack(1, 5)), Missing)
    assert service.events == []


def test_ranks_are_served_in_step_order_and_wait_for_what_is_not_there_yet() -> None:
    """Each rank at its own pace."""
    service = Service()
    service.join(0)
    service.join(1)
    service.tell(b"peer0", Next(1, after=0))
    service.leases.offer(make_batch(1))
    assert service.served == [(b"peer0", 0, 1)]
    service.leases.offer(make_batch(2))
    service.tell(b"peer0", Next(2, after=1))
    service.tell(b"peer1", Next(1, after=0))
    assert service.served[1:] == [(b"peer0", 0, 2), (b"peer1", 1, 1)]


def test_a_rank_starts_at_the_first_batch_that_it_has_not_acknowledged() -> None:
    """Also after a restart of the service, from what was recorded."""
    service = Service()
    service.leases.keep(make_batch(3))
    service.leases.restore(make_batch(4), acked_by={1})
    service.leases.restore(make_batch(5), acked_by=())
    assert service.join(0) == Welcome(PROTOCOL, "r", 2, after=3, version=0)
    assert service.join(1) == Welcome(PROTOCOL, "r", 2, after=4, version=0)


def test_a_rank_of_a_run_with_nothing_leased_starts_behind_the_last_step() -> None:
    """A resumed run in which everything was acknowledged."""
    service = Service(last_step=9, version=9)
    assert service.join(0) == Welcome(PROTOCOL, "r", 2, after=9, version=9)


def test_a_batch_that_every_rank_had_acknowledged_is_completed_when_offered_again() -> None:
    """The process died between the last rank's ack and the note that all had."""
    service = Service()
    service.leases.restore(make_batch(1), acked_by={0, 1})
    assert service.leases.leased == []
    assert service.events == [("ack", 1)]


def test_acknowledged_batches_are_kept_for_a_trainer_that_fell_back() -> None:
    """The last `keep` can be had again; others are named as gone."""
    service = Service(world_size=1, keep=2)
    service.join(0)
    for step in (1, 2, 3):
        service.leases.offer(make_batch(step))
        service.get(0, step)
        service.tell(b"peer0", Ack(step, step))
    service.served.clear()
    service.tell(b"peer0", Get(7, 2))
    service.tell(b"peer0", Next(8, after=2))
    assert service.served == [(b"peer0", 0, 2), (b"peer0", 0, 3)]
    gone = service.tell(b"peer0", Next(9, after=0))
    assert isinstance(gone, Missing)
    assert "step 1 is no longer kept (steps 2 to 3 are)" in gone.reason


def test_an_older_batch_is_loaded_where_that_is_possible() -> None:
    """The journal may keep more than memory does."""
    service = Service(world_size=1, keep=0, can_load=True, last_step=5)
    service.join(0)
    service.tell(b"peer0", Get(1, 4))
    assert service.served == [(b"peer0", 0, 4)]
    assert isinstance(service.tell(b"peer0", Get(2, 6)), Missing)


def test_a_checkpoint_of_another_run_is_recognised() -> None:
    """A trainer that is ahead of the run would wait for ever otherwise."""
    service = Service()
    service.join(0)
    answer = service.tell(b"peer0", Next(1, after=40))
    assert isinstance(answer, Missing)
    assert "another run" in answer.reason


def test_finish_is_told_to_each_rank_after_its_last_batch() -> None:
    """Those who wait at once, the others when they ask for more."""
    service = Service()
    service.join(0)
    service.join(1)
    service.leases.offer(make_batch(1))
    service.get(0, 1)
    service.tell(b"peer0", Next(5, after=1))
    service.sent.clear()
    service.served.clear()
    service.leases.finish("max_steps")
    assert service.sent == [(b"peer0", Finished(5, "max_steps")), (b"peer1", Pong(over="max_steps"))]
    assert not service.leases.all_told, "rank 1 knows that the service leaves, and may ask for what is left"
    assert service.tell(b"peer1", Ping()) == Pong(over="max_steps")
    service.tell(b"peer1", Next(6, after=0))
    assert service.served == [(b"peer1", 1, 1)]
    assert service.tell(b"peer1", Next(7, after=1)) == Finished(7, "max_steps")
    assert service.leases.all_told


def test_the_newest_process_of_a_rank_wins_and_the_old_one_is_told_and_kept_out() -> None:
    """Two processes never take a rank from each other for ever."""
    service = Service()
    service.join(0, "old", b"a")
    with capture_logs() as logs:
        assert isinstance(service.join(0, "new", b"b"), Welcome)
    assert [entry["event"] for entry in logs] == ["trainer.rank_replaced"]
    assert (b"a", Refused("a newer process has joined as rank 0 (pid 0 on )")) in service.sent
    assert service.tell(b"a", Ping()) == Unknown()
    assert isinstance(service.join(0, "old", b"a"), Refused)
    assert service.tell(b"b", Ping()) == Pong()


def test_a_rank_that_reconnects_is_the_same_rank() -> None:
    """The same client on a new connection replaces nobody and may ask again."""
    service = Service()
    service.join(0, "same", b"a")
    service.tell(b"a", Next(1, after=0))
    with capture_logs() as logs:
        assert isinstance(service.join(0, "same", b"b"), Welcome)
    assert logs == []
    service.tell(b"b", Next(1, after=0))
    service.leases.offer(make_batch(1))
    assert service.served == [(b"b", 0, 1)]


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        (
            Join(PROTOCOL + 1, 0, 2, "c"),
            f"the trainer speaks protocol {PROTOCOL + 1}, this orchestrator {PROTOCOL}",
        ),
        (
            Join(PROTOCOL, 0, 4, "c"),
            "rank 0 of world size 4, the orchestrator is configured for world size 2",
        ),
        (Join(PROTOCOL, 2, 2, "c"), "rank 2 of world size 2"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_with_both_sides_named(join: Join, reason: str) -> None:
    """Protocol, world size and rank are checked in the handshake."""
    service = Service()
    answer = service.tell(b"x", join)
    assert isinstance(answer, Refused)
    assert reason in answer.reason
    assert service.leases.ranks == []


def test_a_connection_that_has_not_joined_is_unknown() -> None:
    """So a client of a service that restarted learns that it must join again."""
    assert Service().tell(b"x", Next(1, after=0)) == Unknown()


def test_a_message_that_cannot_be_understood_is_counted_and_answered() -> None:
    """Never fatal."""
    service = Service()
    service.leases.receive(b"x", [b"\xc1nonsense"])
    service.leases.receive(b"x", [])
    assert service.leases.malformed == 2
    assert all(isinstance(message, Refused) for _, message in service.sent)


def test_a_report_of_a_step_that_there_is_is_passed_on() -> None:
    """One of a step to come, or one that the run refuses, is answered with the reason; a stranger's is not looked at."""
    seen: list[tuple[int, dict[str, float]]] = []

    def on_report(step: int, metrics: Mapping[str, float]) -> str:
        seen.append((step, dict(metrics)))
        return "too many names" if len(metrics) > 1 else ""

    service = Service(on_report=on_report)
    service.leases.offer(make_batch(1))
    assert service.tell(b"peer0", Report(1, 1, {"loss": 0.5})) == Unknown()
    service.join(0)
    service.get(0, 1)
    assert service.tell(b"peer0", Report(1, 1, {"loss": 0.5})) == Ok(1)
    assert service.tell(b"peer0", Report(2, 1, {"a": 0.5, "b": 1.0})) == Missing(2, "too many names")
    assert isinstance(service.tell(b"peer0", Report(3, 2, {"loss": 0.5})), Missing)
    assert seen == [(1, {"loss": 0.5}), (1, {"a": 0.5, "b": 1.0})]


def test_a_version_is_published_once_and_older_ones_change_nothing() -> None:
    """Repeating one or going back is harmless and said."""
    service = Service()
    service.join(0)
    assert service.tell(b"peer0", Publish(1, 3, "ckpt/3")) == Ok(1)
    again = service.tell(b"peer0", Publish(2, 3, "ckpt/3"))
    older = service.tell(b"peer0", Publish(3, 2, "ckpt/2"))
    assert again == Ok(2, "version 3 was published before; nothing changes")
    assert older == Ok(3, "version 2 is older than the published 3; nothing changes")
    assert service.events == [("publish", 3, "ckpt/3")]


def test_answers_wait_until_what_they_say_is_recorded() -> None:
    """An acknowledged step is acknowledged after any crash."""
    waiting: list[Callable[[], None]] = []
    service = Service(world_size=1, when_durable=waiting.append)
    service.join(0)
    service.leases.offer(make_batch(1))
    service.get(0, 1)
    assert service.tell(b"peer0", Ack(1, 1)) is None
    assert service.tell(b"peer0", Publish(2, 1)) is None
    for callback in waiting:
        callback()
    assert [message for _, message in service.sent] == [Ok(1), Ok(2)]


def test_done_is_passed_on_once() -> None:
    """Every rank may say it."""
    service = Service()
    service.join(0)
    service.join(1)
    service.tell(b"peer0", Done(1))
    assert service.tell(b"peer1", Done(1)) == Ok(1)
    assert service.events == [("done",)]


def test_ranks_that_leave_or_are_lost_are_gone_and_said() -> None:
    """Their batches stay leased."""
    service = Service()
    service.join(0)
    service.join(1)
    service.leases.offer(make_batch(1))
    with capture_logs() as logs:
        service.tell(b"peer0", Leave())
        service.leases.lose(b"peer1")
        service.leases.lose(b"peer1")
    assert [entry["event"] for entry in logs] == ["trainer.left", "trainer.rank_lost"]
    assert service.leases.ranks == []
    assert service.leases.leased == [1]


def test_batches_are_offered_in_step_order() -> None:
    """Anything else is a mistake of the caller."""
    service = Service()
    service.leases.offer(make_batch(2))
    with pytest.raises(ValueError, match="batch 1 offered after batch 2"):
        service.leases.offer(make_batch(1))


def test_a_publication_tells_which_step_was_trained_on() -> None:
    """After the version, so that ages are never counted from a step that has no version yet."""
    service = Service()
    service.join(0)
    service.tell(b"peer0", Publish(1, 1000, "ckpt", step=7))
    assert service.events[-2:] == [("publish", 1000, "ckpt"), ("trained", 7)]


def test_a_version_that_cannot_be_loaded_is_refused_with_the_reason() -> None:
    """Nothing is recorded, and no step counts as trained on."""
    checks: list[Callable[[str], None]] = []
    service = Service(check_version=lambda version, path, decided: checks.append(decided), last_step=7)
    service.join(0)
    assert service.tell(b"peer0", Publish(1, 7, "ckpt", step=7)) is None
    checks[0]("there are no weights at ckpt")
    assert service.sent == [(b"peer0", Missing(1, "there are no weights at ckpt"))]
    assert service.events == []
    assert service.join(1) == Welcome(PROTOCOL, "r", 2, after=7, version=0)


def test_a_rank_that_comes_back_while_its_version_is_checked_gets_the_answer() -> None:
    """On the new connection, from the one check."""
    checks: list[Callable[[str], None]] = []
    service = Service(check_version=lambda version, path, decided: checks.append(decided), last_step=7)
    service.join(0, "same", b"a")
    service.tell(b"a", Publish(1, 7, "ckpt", step=7))
    service.leases.lose(b"a")
    service.join(0, "same", b"b")
    service.tell(b"b", Publish(1, 7, "ckpt", step=7))
    checks[0]("")
    assert len(checks) == 1
    assert service.sent == [(b"b", Ok(1))]
    assert service.events == [("publish", 7, "ckpt"), ("trained", 7)]


def test_a_version_counts_although_its_rank_is_gone_when_it_is_decided() -> None:
    """The weights are there, whoever said so."""
    checks: list[Callable[[str], None]] = []
    service = Service(check_version=lambda version, path, decided: checks.append(decided))
    service.join(0)
    service.tell(b"peer0", Publish(1, 3, "ckpt"))
    service.leases.lose(b"peer0")
    checks[0]("")
    assert service.events == [("publish", 3, "ckpt")]
    service.join(0)
    assert service.tell(b"peer0", Publish(1, 3, "ckpt")) == Ok(
        1, "version 3 was published before; nothing changes"
    )


def test_a_version_that_appears_in_a_directory_is_checked_too() -> None:
    """By the same rule."""
    service = Service(check_version=lambda version, path, decided: decided("" if path == "good" else "bad"))
    service.leases.publish(1, "spoiled")
    service.leases.publish(2, "good")
    assert service.events == [("publish", 2, "good")]


def test_a_batch_that_a_rank_was_never_served_cannot_be_acknowledged_by_it() -> None:
    """It would be gone without anybody having trained on it."""
    service = Service()
    service.join(0)
    service.join(1)
    service.leases.offer(make_batch(1))
    service.get(1, 1)
    refused = service.tell(b"peer0", Ack(1, 1))
    assert isinstance(refused, Missing)
    assert "rank 0 acknowledges step 1, which it was never served" in refused.reason
    assert service.events == []
    service.get(0, 1)
    assert service.tell(b"peer0", Ack(2, 1)) == Ok(2)


def test_a_batch_of_an_earlier_process_may_be_acknowledged_at_once() -> None:
    """The rank may have it in hand while the service restarts."""
    service = Service(world_size=1)
    service.leases.restore(make_batch(1), ())
    service.join(0)
    assert service.tell(b"peer0", Ack(1, 1)) == Ok(1)


@pytest.mark.parametrize("step", [0, 2, 10**6, 2**53])
def test_a_step_that_was_never_formed_cannot_be_had(step: int) -> None:
    """However far in the future it lies, also where older ones can be loaded."""
    service = Service(can_load=True)
    service.join(0)
    service.leases.offer(make_batch(1))
    assert isinstance(service.tell(b"peer0", Get(1, step)), Missing)
    assert service.served == []


def test_a_rank_that_stays_away_holds_its_leases_and_nothing_else_grows() -> None:
    """What the others have acknowledged stays for it, and is not kept a second time."""
    service = Service(keep=1)
    service.join(0)
    for step in (1, 2):
        service.leases.offer(make_batch(step))
        for request in range(50):
            service.tell(b"peer0", Next(request, after=step - 1))
            service.tell(b"peer0", Ack(request, step))
    assert service.leases.leased == [1, 2]
    assert service.events == [("rank_ack", 1, 0), ("rank_ack", 2, 0)]
    service.join(1)
    for step in (1, 2):
        service.get(1, step)
        service.tell(b"peer1", Ack(step, step))
    assert service.leases.leased == []


def test_a_trainer_of_the_first_protocol_is_let_in() -> None:
    """What came later is optional; it is answered with its own number."""
    service = Service()
    assert service.tell(b"x", Join(1, 0, 2, "c")) == Welcome(1, "r", 2, after=0, version=0)


@pytest.mark.parametrize(
    ("token", "said"),
    [("", "presented no token"), ("guess", "presented another token"), ("ü" * 9, "another")],
)
def test_who_does_not_present_the_token_is_refused_and_learns_nothing_else(token: str, said: str) -> None:
    """Not even whether its world size would be right."""
    service = Service(token="secret")
    answer = service.tell(b"x", Join(PROTOCOL, 0, 99, "c", token=token))
    assert isinstance(answer, Refused)
    assert said in answer.reason
    assert "secret" not in answer.reason
    assert "world size" not in answer.reason
    assert service.leases.ranks == []


def test_who_presents_the_token_is_let_in() -> None:
    """As where there is none."""
    service = Service(token="secret")
    assert isinstance(service.tell(b"x", Join(PROTOCOL, 0, 2, "c", token="secret")), Welcome)


def test_a_connection_that_joins_as_another_rank_is_that_rank_alone() -> None:
    """What it was before is free again for others."""
    service = Service()
    service.join(0, "a", b"one")
    service.join(1, "a", b"one")
    assert [rank.rank for rank in service.leases.ranks] == [1]
    service.join(0, "b", b"two")
    service.leases.lose(b"one")
    assert [rank.rank for rank in service.leases.ranks] == [0]


def test_a_message_of_several_frames_is_malformed() -> None:
    """A trainer's message is one frame."""
    service = Service()
    service.leases.receive(b"x", [encode(Ping())] * 2)
    assert service.leases.malformed == 1


def test_a_stranger_cannot_fill_the_log() -> None:
    """The first lines of a kind are written, then every thousandth."""
    service = Service()
    with capture_logs() as logs:
        for _ in range(3000):
            service.leases.receive(b"x", [b"\xc1"])
            service.tell(b"x", Join(99, 0, 2, "c"))
    for event in ("trainer.message_malformed", "trainer.refused"):
        assert [entry["count"] for entry in logs if entry["event"] == event] == [
            *range(1, 21),
            1000,
            2000,
            3000,
        ]


def test_batches_that_the_ranks_cannot_share_are_refused() -> None:
    """At the start, with the step, the numbers and the remedy; not by ranks that wait for ever."""
    service = Service(world_size=3)
    with pytest.raises(ConfigError, match=r"step 4 .* 8 sequences .* 3 ranks .* divides 8"):
        service.leases.restore(make_batch(4), ())
    with pytest.raises(ConfigError, match="step 5"):
        check_shares([make_batch(5)], 3)
    check_shares([make_batch(5)], 4)


def test_a_trainer_that_sends_weights_itself_is_told_which_engines_stand_still() -> None:
    """And its version is published when it is done; not when it failed, nor where it is refused."""
    updates = UpdatesAtOnce()
    service = Service(world_size=1, updates=updates)
    service.join(0)
    assert service.tell(b"peer0", Updating(1, 3)) == Engines(1, ["http://one/v1", "http://two/v1"])
    assert service.tell(b"peer0", Updated(2, 3)) == Ok(2)
    assert service.events == [("publish", 3, "(sent)")]
    assert service.tell(b"peer0", Updated(3, 4, failed="ZeroDivisionError")) == Ok(3)
    waited = service.tell(b"peer0", Updated(4, 4, wait_s=3))
    assert waited == Published(4, {"engine": ""})
    updates.refuse = "no"
    assert service.tell(b"peer0", Updating(5, 5)) == Missing(5, "no")
    assert service.tell(b"peer0", Updated(6, 5)) == Missing(6, "no")
    assert service.events == [("publish", 3, "(sent)"), ("publish", 4, "(sent)")]


def test_whoever_sends_weights_is_gone_with_its_connection_or_its_place() -> None:
    """One that only connects again is not."""
    updates = UpdatesAtOnce()
    service = Service(world_size=2, updates=updates)
    service.join(0, client="a")
    service.join(0, client="a", peer=b"again")
    assert updates.told == []
    service.join(0, client="b", peer=b"other")
    assert updates.told == [("gone",)]
    service.leases.lose(b"other")
    assert updates.told == [("gone",)] * 2
    service.join(1)
    service.tell(b"peer1", Leave())
    assert updates.told == [("gone",)] * 3


def test_a_pong_says_how_many_engines_wait_for_weights() -> None:
    """So a trainer that waits for a batch hears of it."""
    updates = UpdatesAtOnce()
    service = Service(world_size=1, updates=updates)
    service.join(0)
    assert service.tell(b"peer0", Ping()) == Pong()
    updates.waiting = 2
    assert service.tell(b"peer0", Ping()) == Pong(2)
