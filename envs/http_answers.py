"""Answers of HTTP/1.1 servers, read from bytes as they come: the head, then a body whose end is told in one of three ways.

A body has an announced length, or comes in chunks, or ends with the connection. One `AnswerReader` reads one answer;
`keep` says whether the connection can carry another request behind it. What is no HTTP, or contradicts itself, is a
`BadAnswerError`; a success that is larger than allowed is a `TooLargeError`; of anything else than a success only the
beginning is read. Nobody asks for compressed bodies, but gzip and deflate are understood. Pure: no I/O.
"""

import zlib

MAX_HEAD_BYTES = 64 * 1024
MAX_ERROR_BYTES = 64 * 1024
"""As much of an answer other than a success is worth reading."""

_OK = 200
_EMPTY = frozenset({101, 204, 304})
_MAX_DIGITS = 15
_HEXADECIMAL = frozenset(b"0123456789abcdefABCDEF")
_WITH_LENGTH, _IN_CHUNKS, _UNTIL_CLOSED = range(3)


class BadAnswerError(ValueError):
    """What came is no answer in HTTP/1.1."""


class TooLargeError(ValueError):
    """The body of a success is larger than allowed."""


class AnswerReader:
    """Reads one answer: `feed` it bytes until `done`, or tell it that the connection has ended."""

    __slots__ = (
        "_buffer",
        "_framing",
        "_left",
        "_max_bytes",
        "_pieces",
        "_size",
        "_trailing",
        "done",
        "headers",
        "keep",
        "status",
    )

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = b""
        """What was received and not understood yet: a part of the head, or of the line before a chunk."""
        self._pieces: list[bytes] = []
        self._size = 0
        self._left = 0
        self._trailing = False
        self._framing = _WITH_LENGTH
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.done = False
        self.keep = True

    def feed(self, data: bytes) -> None:
        """Read on; may set `done`. Raises BadAnswerError or TooLargeError, after which nothing more may be fed."""
        if not self.status:
            data = self._buffer + data
            self._buffer = b""
            while not self.status:
                end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
                if end < 0:
                    if len(data) >= MAX_HEAD_BYTES:
                        raise BadAnswerError(f"the head of the answer is longer than {MAX_HEAD_BYTES} bytes")
                    self._buffer = data
                    return
                self._read_head(data[:end])
                data = data[end + 4 :]
        if self._framing == _WITH_LENGTH:
            self._read_with_length(data)
        elif self._framing == _IN_CHUNKS:
            self._read_chunks(data)
        elif data:
            self._add(data)

    def end(self) -> None:
        """The connection was closed by the other side; ConnectionError where that was too early."""
        if not self.done and (not self.status or self._framing != _UNTIL_CLOSED):
            raise ConnectionResetError("the server closed the connection before its answer was complete")
        self.done, self.keep = True, False

    def body(self) -> bytes:
        """The body of a complete answer."""
        whole = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        encoding = self.headers.get(b"content-encoding", b"identity").lower()
        return whole if encoding == b"identity" or not whole else self._unpacked(whole, encoding)

    def _read_head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        version, _, rest = lines[0].partition(b" ")
        status = rest[:3]
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or not status.isdigit() or rest[3:4] not in (b"", b" "):
            raise BadAnswerError(f"no HTTP/1.1 answer begins with {lines[0][:60]!r}")
        if status.startswith(b"1") and status != b"101":
            return  # word of an answer that is to come
        headers = self.headers
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or not name or name != name.strip():
                raise BadAnswerError(f"{line[:60]!r} is no header")
            name, value = name.lower(), value.strip()
            if name == b"content-length" and headers.get(name, value) != value:
                raise BadAnswerError("the answer announces two lengths")
            headers[name] = value
        self.status = int(status)
        self.keep = version == b"HTTP/1.1" and b"close" not in headers.get(b"connection", b"").lower()
        self._find_framing()

    def _find_framing(self) -> None:
        length = self.headers.get(b"content-length")
        transfer = self.headers.get(b"transfer-encoding")
        if self.status in _EMPTY:
            self.keep &= self.status != 101  # which nobody asked for: another protocol begins here
        elif transfer is not None:
            if transfer.lower() != b"chunked":
                raise BadAnswerError(f"the transfer encoding {transfer[:60]!r} is not known")
            self._framing = _IN_CHUNKS
            self.keep &= length is None
        elif length is not None:
            if not length.isdigit() or len(length) > _MAX_DIGITS:
                raise BadAnswerError(f"{length[:60]!r} is no length")
            self._left = int(length)
            if self.status == _OK and self._left > self._max_bytes:
                raise TooLargeError
        else:
            self._framing, self.keep = _UNTIL_CLOSED, False

    def _read_with_length(self, data: bytes) -> None:
        if len(data) > self._left:
            # Something behind the answer that nobody asked for: the connection is not to be trusted with another.
            data, self.keep = data[: self._left], False
        self._left -= len(data)
        if data:
            self._add(data)
        self.done |= not self._left

    def _read_chunks(self, data: bytes) -> None:
        """Each chunk is a line with its size and the bytes with a line's end; behind the one of size 0 are lines up to an empty one."""
        data = self._buffer + data
        start = 0
        while not self.done:
            if self._left > 2:  # bytes of a chunk, with its line's end
                piece = data[start : start + self._left - 2]
                if not piece:
                    break
                start += len(piece)
                self._left -= len(piece)
                self._add(piece)
            elif self._left:
                if len(data) - start < 2:
                    break
                if data[start : start + 2] != b"\r\n":
                    raise BadAnswerError("a chunk is longer than announced")
                start, self._left = start + 2, 0
            else:
                end = data.find(b"\r\n", start)
                if end < 0:
                    if len(data) - start > MAX_HEAD_BYTES:
                        raise BadAnswerError("the line before a chunk has no end")
                    break
                line, start = data[start:end], end + 2
                self._read_size(line)
        self._buffer = data[start:]
        if self.done and self._buffer:
            self.keep = False

    def _read_size(self, line: bytes) -> None:
        if self._trailing:
            self.done |= not line  # else a trailer, which nobody reads
            return
        digits = line.partition(b";")[0].strip()
        if not 0 < len(digits) <= _MAX_DIGITS or not _HEXADECIMAL.issuperset(digits):
            raise BadAnswerError(f"{line[:60]!r} is no size of a chunk")
        size = int(digits, 16)
        self._left, self._trailing = (size + 2, False) if size else (0, True)

    def _add(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if self.status == _OK:
            if self._size > self._max_bytes:
                raise TooLargeError
        elif self._size > MAX_ERROR_BYTES:
            self.done, self.keep = True, False

    def _unpacked(self, whole: bytes, encoding: bytes) -> bytes:
        if encoding not in (b"gzip", b"x-gzip", b"deflate"):
            raise BadAnswerError(f"the answer is encoded as {encoding[:60]!r}, which nobody asked for")
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
        try:
            if self.status != _OK:
                return unpacker.decompress(whole, MAX_ERROR_BYTES)
            body = unpacker.decompress(whole, self._max_bytes + 1)
        except zlib.error as error:
            raise BadAnswerError(f"the answer is no {encoding.decode()}: {error}") from error
        if len(body) > self._max_bytes:
            raise TooLargeError
        if not unpacker.eof:
            raise BadAnswerError(f"the answer is {encoding.decode()} without its end")
        return body
