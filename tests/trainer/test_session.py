"""The trainer's half of the conversation: what was asked is asked again until it is answered."""

import pytest

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.protocol import (
    PROTOCOL,
    Ack,
    Finished,
    Join,
    Next,
    Ok,
    Ping,
    Pong,
    Publish,
    Refused,
    Served,
    ToTrainer,
    Unknown,
    Welcome,
    decode_to_server,
    encode,
)
from orchestrator.trainer.session import Answered, TrainerSession

WELCOME = Welcome(PROTOCOL, run="r", world_size=2, after=0, version=0)


def make_session(rank: int = 0, world_size: int = 2, token: str = "") -> TrainerSession:
    return TrainerSession(rank=rank, world_size=world_size, token=token)


def hear(session: TrainerSession, message: ToTrainer, *frames: bytes) -> tuple[list[object], Answered | None]:
    """What the session sends and yields when a message comes."""
    out, reply = session.receive([encode(message), *frames])
    return [decode_to_server(frame) for frame in out], reply


def test_a_request_waits_for_the_welcome() -> None:
    """Nothing is asked on a connection that has not joined."""
    session = make_session(rank=1, world_size=2)
    joined = decode_to_server(session.hello())
    assert isinstance(joined, Join)
    assert (joined.protocol, joined.rank, joined.world_size) == (PROTOCOL, 1, 2)
    assert session.ask(Next(1, after=0)) == []
    assert hear(session, WELCOME) == ([Next(1, after=0)], None)
    assert session.ask(Ack(2, 1)) == [encode(Ack(2, 1))]


def test_the_end_of_a_run_is_known_until_it_is_served_again() -> None:
    """However it was told, and whatever else the service says before it leaves."""
    session = make_session()
    hear(session, WELCOME)
    for message in (Pong(over="max_steps"), Finished(0, "max_steps")):
        hear(session, message)
        hear(session, Pong())
        hear(session, WELCOME)  # a second answer to one join
        assert session.over == "max_steps"
        hear(session, Unknown())
        hear(session, WELCOME)
        assert session.over == ""


def test_everything_unanswered_is_asked_again_after_a_restart_of_the_service() -> None:
    """What was answered is not."""
    session = make_session(rank=0, world_size=2)
    hear(session, WELCOME)
    session.ask(Ack(1, 1))
    session.ask(Next(2, after=1))
    assert hear(session, Ok(1)) == ([], Answered(Ok(1), []))
    sent, _ = hear(session, Unknown())
    assert [type(message) for message in sent] == [Join]
    assert hear(session, WELCOME) == ([Next(2, after=1)], None)


def test_joins_that_piled_up_do_not_make_it_ask_more_than_once() -> None:
    """A batch is large: one answer to several joins is enough."""
    session = make_session(rank=0, world_size=2)
    session.ask(Next(1, after=0))
    session.hello()
    session.hello()
    assert hear(session, WELCOME)[0] == [Next(1, after=0)]
    assert hear(session, WELCOME)[0] == []
    assert hear(session, Unknown())[0] != []
    assert hear(session, Unknown())[0] == []


def test_an_answer_counts_once() -> None:
    """A second answer to the same request, and one to a forgotten request, are dropped."""
    session = make_session(rank=0, world_size=2)
    hear(session, WELCOME)
    session.ask(Next(1, after=0))
    session.ask(Next(2, after=1))
    session.forget(2)
    _, reply = hear(session, Served(1, 1), b"frame")
    assert reply is not None
    assert list(reply.frames) == [b"frame"]
    assert hear(session, Served(1, 1), b"frame") == ([], None)
    assert hear(session, Served(2, 2), b"frame") == ([], None)


def test_silence_is_answered_by_a_ping_or_another_join() -> None:
    """Depending on whether the service knows the connection."""
    session = make_session(rank=0, world_size=2)
    assert isinstance(decode_to_server(session.silence()), Join)
    hear(session, WELCOME)
    assert decode_to_server(session.silence()) == Ping()
    assert hear(session, Pong()) == ([], None)


def test_what_can_only_be_wrong_is_an_error() -> None:
    """A refusal, another run, another language."""
    session = make_session(rank=0, world_size=2)
    hear(session, WELCOME)
    with pytest.raises(TrainerLinkError, match="rank 0 was refused: no"):
        hear(session, Refused("no"))
    with pytest.raises(TrainerLinkError, match="now serves run other"):
        hear(session, Welcome(PROTOCOL, run="other", world_size=2, after=0, version=0))
    with pytest.raises(TrainerLinkError, match="cannot be understood"):
        session.receive([b"\xc1"])


def test_a_join_says_what_the_process_knows_of_rewinds_unless_it_asks_for_one() -> None:
    """Nothing at first; afterwards what it was told last, but not while it waits for the run to be set back."""

    def known(session: TrainerSession) -> int | None:
        joined = decode_to_server(session.hello())
        assert isinstance(joined, Join)
        return joined.rewinds

    session = make_session()
    assert known(session) is None
    hear(session, WELCOME)
    assert known(session) == 0
    session.ask(Next(1, after=3, rewind=True))
    assert known(session) is None
    hear(session, Welcome(PROTOCOL, run="r", world_size=2, after=0, version=0, rewinds=1))
    hear(session, Served(1, 4), b"frame")
    assert known(session) == 1


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0)])
def test_a_rank_outside_of_the_world_is_a_mistake(rank: int, world_size: int) -> None:
    """Said before anything is sent."""
    with pytest.raises(ValueError, match="rank must be at least 0"):
        make_session(rank=rank, world_size=world_size)


def test_the_token_goes_with_every_join() -> None:
    """And without one the join is what it always was."""
    with_token = decode_to_server(make_session(token="secret").hello())
    without = decode_to_server(make_session().hello())
    assert isinstance(with_token, Join)
    assert isinstance(without, Join)
    assert (with_token.token, without.token) == ("secret", "")


def test_a_request_out_of_bounds_is_an_error_where_it_is_made() -> None:
    """The service is not bothered, and nothing is asked again for ever."""
    session = make_session()
    hear(session, WELCOME)
    with pytest.raises(ValueError, match="version"):
        session.ask(Publish(1, -1))
    hear(session, Unknown())
    assert hear(session, WELCOME) == ([], None)


def test_an_empty_message_is_an_error_that_says_so() -> None:
    """As any other that cannot be understood."""
    with pytest.raises(TrainerLinkError, match="cannot be understood"):
        make_session().receive([])
