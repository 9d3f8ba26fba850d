"""Answers of HTTP servers: read the same however they are cut, and refused when they are none."""

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.http_answers import MAX_ERROR_BYTES, MAX_HEAD_BYTES, AnswerReader, BadAnswerError, TooLargeError

BODY = b'{"choices": []}\r\n\r\n0\r\n'


def with_length(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *lines])
    return head.encode() + b"\r\n\r\n" + body


def in_chunks(*pieces: bytes, trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"


def read(data: bytes, *, max_bytes: int = 1 << 20, ends: bool = False) -> AnswerReader:
    reader = AnswerReader(max_bytes)
    reader.feed(data)
    if ends:
        reader.end()
    return reader


ANSWERS = {
    "with a length": (with_length(BODY), 200, BODY, True),
    "in chunks": (in_chunks(BODY[:5], BODY[5:]), 200, BODY, True),
    "in chunks with trailers": (in_chunks(BODY, trailer=b"X: y\r\nZ: 0\r\n"), 200, BODY, True),
    "without a body": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "that changes the protocol": (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", 101, b"", False),
    "behind words that an answer is to come": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + with_length(BODY),
        200,
        BODY,
        True,
    ),
    "without a reason": (with_length(BODY, status="503"), 503, BODY, True),
    "of a server that closes": (with_length(BODY, "connection: Close"), 200, BODY, False),
    "of an older server": (with_length(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"), 200, BODY, False),
    "packed": (with_length(gzip.compress(BODY), "Content-Encoding: gzip"), 200, BODY, True),
    "packed otherwise": (with_length(zlib.compress(BODY), "CONTENT-ENCODING: deflate"), 200, BODY, True),
}


@pytest.mark.parametrize("kind", list(ANSWERS))
@given(data=st.data())
def test_an_answer_is_the_same_however_it_is_cut(kind: str, data: st.DataObject) -> None:
    """The network cuts where it likes, also in the middle of a line's end."""
    raw, status, body, keep = ANSWERS[kind]
    places = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader = AnswerReader(1 << 20)
    for start, end in zip([0, *places], [*places, len(raw)], strict=True):
        if start < end:
            assert not reader.done
            reader.feed(raw[start:end])
    assert reader.done
    assert (reader.status, reader.body(), reader.keep) == (status, body, keep)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    """As servers of HTTP/1.0 do it; such a connection carries nothing else."""
    reader = read(b"HTTP/1.1 200 OK\r\n\r\n" + BODY)
    assert not reader.done
    reader.end()
    assert (reader.done, reader.keep, reader.body()) == (True, False, BODY)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200", with_length(BODY)[:-1], in_chunks(BODY)[:-1]])
def test_an_answer_whose_connection_ends_too_early_is_a_broken_connection(data: bytes) -> None:
    """Half an answer is never taken for a whole one."""
    with pytest.raises(ConnectionError):
        read(data, ends=True)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length : 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 5000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * (MAX_HEAD_BYTES + 1),
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES,
        with_length(b"no gzip", "Content-Encoding: gzip"),
        with_length(gzip.compress(BODY)[:-1], "Content-Encoding: gzip"),
        with_length(BODY, "Content-Encoding: br"),
    ],
)
def test_what_is_no_answer_is_said_to_be_none(data: bytes) -> None:
    """Whatever listens at the address, it ends as one kind of error."""
    with pytest.raises(BadAnswerError):
        read(data).body()


@given(data=st.binary(max_size=200), start=st.sampled_from(["", "with a length", "in chunks"]))
def test_no_other_error_leaves_the_reader(data: bytes, start: str) -> None:
    """Any bytes, at any place, are read, waited behind, or refused."""
    raw = ANSWERS[start][0][:45] if start else b""
    reader = AnswerReader(100)
    try:
        reader.feed(raw + data)
    except (BadAnswerError, TooLargeError):
        return
    if reader.done:
        assert reader.status


@pytest.mark.parametrize(
    "data",
    [
        with_length(BODY),
        in_chunks(BODY),
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
        with_length(gzip.compress(bytes(100_000)), "Content-Encoding: gzip"),
    ],
)
def test_a_success_beyond_the_limit_is_refused(data: bytes) -> None:
    """However its end is told, and packed or not."""
    with pytest.raises(TooLargeError):
        read(data, max_bytes=len(BODY) - 1 if b"gzip" not in data else 1000, ends=False).body()


def test_only_the_beginning_of_an_error_is_read() -> None:
    """The connection is given up instead of being drained."""
    reader = read(with_length(b"x" * 3_000_000, status="500 Oh")[: MAX_ERROR_BYTES + 1000])
    assert (reader.done, reader.keep, reader.status) == (True, False, 500)
    assert reader.body().startswith(b"xxx")


def test_a_connection_that_says_more_than_it_was_asked_is_not_kept() -> None:
    """The next request would be answered with what is left over."""
    for raw in (with_length(BODY), in_chunks(BODY)):
        reader = read(raw + b"HTTP/1.1")
        assert (reader.done, reader.keep, reader.body()) == (True, False, BODY)
