"""Messages as files: whole or not there, in order, and a slow or broken disk is survived."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.filesystem import (
    FileChannel,
    directory_of,
    messages_in,
    read_message,
    write_message,
)
from orchestrator.trainer.protocol import MAX_REQUEST_BYTES
from orchestrator.trainer_link.files import FileLink
from tests.support.waiting import until

PEER = "0123456789abcdef" * 2


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "box").mkdir()
    return tmp_path


@given(frames=st.lists(st.binary(max_size=300), max_size=6))
def test_a_message_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, frames: list[bytes]
) -> None:
    """Any number of frames of any size, as writable views that start where arrays may."""
    directory = tmp_path_factory.mktemp("box")
    write_message(directory, directory, "m", frames)
    got = read_message(directory / "m")
    assert [bytes(frame) for frame in got] == frames
    assert all(not frame.readonly for frame in got)


def test_nobody_sees_half_a_message(scratch: Path) -> None:
    """It is written elsewhere and renamed; a failure leaves nothing at all."""
    name = f"{PEER}.{0:012d}.msg"
    with pytest.raises(OSError, match="nowhere"):
        write_message(scratch / "nowhere", scratch / "tmp", name, [b"x"])
    assert list((scratch / "tmp").iterdir()) == []
    write_message(scratch / "box", scratch / "tmp", name, [b"x"])
    assert [path.name for _, path in messages_in(scratch / "box")] == [name]
    assert list((scratch / "tmp").iterdir()) == []


@pytest.mark.parametrize("cut", [0, 7, 15, 20, 40, 64])
def test_a_file_that_is_cut_off_is_not_a_message(scratch: Path, cut: int) -> None:
    """Whatever a broken disk leaves is recognised."""
    write_message(scratch / "box", scratch / "tmp", "m", [b"header", b"body" * 10])
    data = (scratch / "box" / "m").read_bytes()
    (scratch / "box" / "m").write_bytes(data[:cut])
    with pytest.raises(ValueError, match="m is"):
        read_message(scratch / "box" / "m")


def test_other_files_in_the_directory_are_left_alone(scratch: Path) -> None:
    """Only names of the right form are messages, in the order of their numbers."""
    for name in ("notes.txt", "../x", f"{PEER}.1.msg"):
        (scratch / "box" / name.replace("/", "_")).write_text("")
    for number in (10, 2, 9):
        write_message(scratch / "box", scratch / "tmp", f"{PEER}.{number:012d}.msg", [b"%d" % number])
    assert [bytes(read_message(path)[0]) for _, path in messages_in(scratch / "box")] == [b"2", b"9", b"10"]


@pytest.mark.parametrize("address", ["file://host/run", "file://run", "file://"])
def test_an_address_must_name_a_directory_in_full(address: str) -> None:
    """A relative path would mean another directory on the other side."""
    with pytest.raises(TrainerLinkError, match="name the directory in full"):
        directory_of(address)


class Service:
    """The service's side of a directory, keeping what comes."""

    def __init__(self, root: Path) -> None:
        self.errors: list[str] = []
        self.inbox: asyncio.Queue[tuple[bytes, list[Any]]] = asyncio.Queue()
        self.link = FileLink(f"file://{root}", on_error=self.errors.append, poll_s=0.01)

    async def __aenter__(self) -> "Service":
        self.link.start(
            asyncio.get_running_loop(),
            lambda peer, frames: self.inbox.put_nowait((peer, [bytes(f) for f in frames])),
            peers=list,
            on_lost=lambda peer: None,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.link.aclose()


async def test_messages_go_both_ways_in_order_and_are_deleted_when_read(tmp_path: Path) -> None:
    """The same as a socket would do."""
    async with Service(tmp_path) as service:
        channel = FileChannel(f"file://{tmp_path}", poll_s=0.01)
        for number in range(5):
            channel.send(b"%d" % number)
        got = [await service.inbox.get() for _ in range(5)]
        assert [frames for _, frames in got] == [[b"%d" % number] for number in range(5)]
        for number in range(3):
            service.link.send(got[0][0], [b"header", memoryview(b"%d" % number)])
        answers: list[list[bytes]] = []
        while len(answers) < 3:
            await channel.wait_async(5)
            frames = channel.receive()
            assert frames is not None
            answers.append([bytes(frame) for frame in frames])
        assert answers == [[b"header", b"%d" % number] for number in range(3)]
        assert list((tmp_path / "inbox").iterdir()) == []
        channel.close()
        assert list((tmp_path / "outbox").iterdir()) == []


async def test_two_trainers_get_their_own_answers(tmp_path: Path) -> None:
    """Nobody reads another's outbox."""
    async with Service(tmp_path) as service:
        channels = [FileChannel(f"file://{tmp_path}", poll_s=0.01) for _ in range(2)]
        for number, channel in enumerate(channels):
            channel.send(b"%d" % number)
        peers = {frames[0]: peer for peer, frames in [await service.inbox.get() for _ in channels]}
        for number, channel in enumerate(channels):
            service.link.send(peers[b"%d" % number], [b"for %d" % number])
            await channel.wait_async(5)
            frames = channel.receive()
            assert frames is not None
            assert bytes(frames[0]) == b"for %d" % number
            channel.close()


async def test_a_service_that_starts_forgets_what_was_said_to_the_one_before(tmp_path: Path) -> None:
    """A join of a trainer that died meanwhile must not come up again."""
    channel = FileChannel(f"file://{tmp_path}", poll_s=0.01)
    channel.send(b"to the old one")
    async with Service(tmp_path) as service:
        channel.send(b"to the new one")
        assert (await service.inbox.get())[1] == [b"to the new one"]
        assert service.inbox.empty()
    channel.close()


async def test_a_file_that_is_no_message_is_handed_on_as_nothing_and_removed(tmp_path: Path) -> None:
    """`Leases` counts it as malformed."""
    async with Service(tmp_path) as service:
        (tmp_path / "inbox" / f"{PEER}.{0:012d}.msg").write_bytes(b"nonsense")
        assert await service.inbox.get() == (PEER.encode(), [])
        assert list((tmp_path / "inbox").iterdir()) == []


async def test_an_answer_that_cannot_be_written_is_said_once_and_tried_again(tmp_path: Path) -> None:
    """A shared disk comes and goes."""
    async with Service(tmp_path) as service:
        (tmp_path / "outbox").rmdir()
        (tmp_path / "outbox").write_text("in the way")
        service.link.send(PEER.encode(), [b"answer"])
        await until(lambda: service.errors)
        (tmp_path / "outbox").unlink()
        await until(lambda: list(messages_in(tmp_path / "outbox" / PEER)))
        assert len(service.errors) == 1


async def test_a_trainer_waits_while_the_directory_cannot_be_read(tmp_path: Path) -> None:
    """A shared disk comes and goes: what was written before is read when it is back."""
    async with Service(tmp_path) as service:
        channel = FileChannel(f"file://{tmp_path}", poll_s=0.01)
        channel.send(b"hello")
        peer, _ = await service.inbox.get()
        service.link.send(peer, [b"answer"])
        outbox = tmp_path / "outbox"
        await until(lambda: list(messages_in(outbox / peer.decode())))
        outbox.rename(tmp_path / "away")
        outbox.write_text("in the way")
        await channel.wait_async(0.02)
        assert channel.receive() is None
        outbox.unlink()
        (tmp_path / "away").rename(outbox)
        await channel.wait_async(5)
        frames = channel.receive()
        assert frames is not None
        assert bytes(frames[0]) == b"answer"
        channel.close()


async def test_a_directory_that_cannot_be_made_is_an_error_with_its_name(tmp_path: Path) -> None:
    """Before anything is served."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerLinkError, match="file/link"):
        Service(tmp_path / "file" / "link").link.start(
            asyncio.get_running_loop(), lambda peer, frames: None, peers=list, on_lost=print
        )


async def test_files_that_cannot_be_a_message_do_not_hold_up_those_behind_them(tmp_path: Path) -> None:
    """Too large, a link, a directory: what can be removed is, and the next message is read."""
    async with Service(tmp_path) as service:
        inbox = tmp_path / "inbox"
        (inbox / f"{PEER}.{0:012d}.msg").mkdir()
        (tmp_path / "elsewhere").write_bytes(b"")
        (inbox / f"{PEER}.{1:012d}.msg").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "large").write_bytes(bytes(MAX_REQUEST_BYTES + 1))
        (tmp_path / "large").rename(inbox / f"{PEER}.{2:012d}.msg")
        write_message(inbox, tmp_path / "tmp", f"{PEER}.{3:012d}.msg", [b"real"])
        got = [await service.inbox.get() for _ in range(3)]
        assert [frames for _, frames in got] == [[], [], [b"real"]]
        assert service.errors == []
        assert (tmp_path / "elsewhere").exists()
