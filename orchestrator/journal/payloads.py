"""Payload files: where the arrays and transcripts of recorded groups lie.

A payload is one run of bytes, little-endian: lengths (int32), rewards, advantages (float32), facts (40 bytes a
sequence), tokens (int32), logprobs (float32), mask (uint8), details, transcript, each filled up with zeros to 8 bytes.
(Those of schemas 1 and 2 have neither facts nor details; their codec tells.) The group's row knows the file, the
offset, the size and a checksum. Payloads are appended to numbered files ("segments"); one that no row refers to
any more is overwritten as a new one, or deleted, so space is given back without moving data. They are files of
their own rather than SQLite blobs because the way through the WAL and the checkpoint costs several times the CPU.
A segment begins with 64 bytes that name its run (those that schema 1 wrote do not; offsets count from the start of the
file either way). What a transaction adds begins at a whole block and is filled up to one (see `stage`).

Appended payloads are sure to be on disk after `sync` only, and the caller runs it before it makes rows durable.
"""

import os
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from orchestrator.groups.group import FACTS, Group, plain_facts
from orchestrator.journal.directory import make_private, open_private, sync_file
from orchestrator.journal.stage import Stage
from orchestrator.tasks.task import TrainTask

SEGMENT_BYTES = 32 * 1024 * 1024
_SPARE_SEGMENTS = 4
"""Segments kept for overwriting: their blocks need not be found, and noted, again."""

RAW, ZLIB = 4, 5
"""Codecs of a payload."""
_OLD_CODECS = (0, 1)
"""Raw and zlib as schema 1 wrote them: the sum of words lacks the highest bit."""
_CODECS_2 = (2, 3)
"""Raw and zlib as schema 2 wrote them."""
_RAW_CODECS = (0, 2, 4)

_HEADER = struct.Struct("<8s32sQQQ")
_MAGIC = b"RLOJSEG2"


class DamagedPayloadError(Exception):
    """A payload that is missing, short or does not have its checksum, or a row that is not what was recorded."""


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a payload lies."""

    segment: int
    offset: int
    bytes: int
    codec: int
    checksum: int


def parts_of(group: Group) -> list[memoryview]:
    """The pieces of a group's payload in their order; large arrays are not copied."""
    arrays = (
        np.asarray(group.lengths, dtype="<i4"),
        np.ascontiguousarray(group.rewards, dtype="<f4"),
        np.ascontiguousarray(group.advantages, dtype="<f4"),
        np.ascontiguousarray(group.facts, dtype=FACTS).view("u1"),
        np.ascontiguousarray(group.tokens, dtype="<i4"),
        np.ascontiguousarray(group.logprobs, dtype="<f4"),
        np.ascontiguousarray(group.mask, dtype="u1"),
    )
    parts = [array.data.cast("B") for array in arrays if array.size]
    parts.append(memoryview(group.details))
    parts.append(memoryview(group.transcript))
    return parts


def group_from(
    payload: bytearray,
    task: TrainTask,
    *,
    version: int,
    version_end: int,
    rollouts: int,
    sequences: int,
    tokens: int,
    codec: int,
    details_bytes: int,
    digest: int,
    transcript_bytes: int,
    part: int = 0,
) -> Group:
    """The group whose payload this is; its arrays are views on it."""
    starts, position = [], 0
    facts_bytes = 0 if codec in _OLD_CODECS + _CODECS_2 else FACTS.itemsize * sequences
    small = 4 * sequences
    for size in (small, small, small, facts_bytes, 4 * tokens, 4 * tokens, tokens, details_bytes):
        starts.append(position)
        position += size + -size % 8
    view = memoryview(payload)
    facts = (
        np.frombuffer(payload, FACTS, sequences, starts[3])
        if facts_bytes
        else plain_facts(sequences, version=version, version_end=version_end)
    )
    return Group(
        task=task,
        version=version,
        version_end=version_end,
        rollouts=rollouts,
        lengths=tuple(np.frombuffer(payload, "<i4", sequences).tolist()),
        rewards=np.frombuffer(payload, "<f4", sequences, starts[1]),
        advantages=np.frombuffer(payload, "<f4", sequences, starts[2]),
        tokens=np.frombuffer(payload, "<i4", tokens, starts[4]),
        logprobs=np.frombuffer(payload, "<f4", tokens, starts[5]),
        mask=np.frombuffer(payload, "u1", tokens, starts[6]),
        facts=facts,
        details=bytes(view[starts[7] : starts[7] + details_bytes]),
        digest=digest,
        transcript=bytes(view[position : position + transcript_bytes]),
        part=part,
    )


def checksum(data: memoryview) -> int:
    """The sum of the 64-bit words, filled up with zeros, as a signed number of 64 bits.

    It is to tell pages that a power cut or an overwriting left from the right ones, and to find any flipped bit, at
    the speed of memory.
    """
    words, rest = divmod(data.nbytes, 8)
    total = int(np.add.reduce(np.frombuffer(data, "<u8", words))) if words else 0
    if rest:
        total += int.from_bytes(data[-rest:], "little")
    total &= 0xFFFF_FFFF_FFFF_FFFF
    return total - (1 << 64) if total >> 63 else total


def _has_checksum(data: memoryview, place: Place) -> bool:
    found = checksum(data)
    return (found & 0x7FFF_FFFF_FFFF_FFFF if place.codec in _OLD_CODECS else found) == place.checksum


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself: the run that it belongs to, and the last step on disk when it was begun."""

    run_id: str
    segment: int
    step: int

    def encode(self) -> bytes:
        head = _HEADER.pack(_MAGIC, self.run_id.encode(), self.segment, self.step, 0)
        return head[:-8] + zlib.crc32(head[:-8]).to_bytes(8, "little")

    @classmethod
    def read(cls, path: Path) -> "SegmentHeader | None":
        """The header of a segment; None when it has none that can be trusted."""
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            return None
        magic, run_id, segment, step, sum_of_head = _HEADER.unpack(head)
        if magic != _MAGIC or sum_of_head != zlib.crc32(head[:-8]):
            return None
        return cls(run_id.rstrip(b"\0").decode("ascii", "replace"), segment, step)


def segment_path(directory: Path, segment: int) -> Path:
    return directory / segment_name(segment)


def segment_name(segment: int) -> str:
    return f"{segment:08d}.bin"


def segments_in(directory: Path) -> Iterator[int]:
    """Numbers of the segments that exist."""
    for path in directory.glob("*.bin"):
        if path.stem.isdigit():
            yield int(path.stem)


def read_stored(directory: Path, place: Place) -> bytearray:
    """The bytes of a payload as they are stored, checked; raises DamagedPayloadError."""
    if not all(
        isinstance(number, int) and number >= 0 for number in (place.segment, place.offset, place.bytes)
    ):
        raise DamagedPayloadError("the row says no place where a payload can be")
    try:
        # Without a file object: a run that is continued reads ten thousand payloads before it goes on.
        file = os.open(f"{directory}/{segment_name(place.segment)}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if place.offset + place.bytes > os.fstat(file).st_size:
                raise DamagedPayloadError(f"segment {place.segment} ends before {place.offset + place.bytes}")
            data = bytearray(place.bytes)
            view, got = memoryview(data), 0
            while got < place.bytes and (count := os.preadv(file, [view[got:]], place.offset + got)):
                got += count
        finally:
            os.close(file)
    except FileNotFoundError as error:
        raise DamagedPayloadError(f"segment {place.segment} is missing") from error
    except OSError as error:
        raise DamagedPayloadError(f"segment {place.segment} cannot be read: {error.strerror}") from error
    if got < place.bytes or not _has_checksum(view, place):
        raise DamagedPayloadError(f"segment {place.segment} is damaged at {place.offset}")
    return data


def read_payload(directory: Path, place: Place) -> bytearray:
    """The bytes of a payload, checked and decompressed; raises DamagedPayloadError."""
    data = read_stored(directory, place)
    if place.codec in _RAW_CODECS:
        return data
    try:
        return bytearray(zlib.decompressobj().decompress(data))
    except zlib.error as error:
        raise DamagedPayloadError(f"segment {place.segment} is damaged at {place.offset}: {error}") from error


class PayloadWriter:
    """Appends payloads. Not thread-safe; owned by the journal's writer thread."""

    def __init__(
        self,
        directory: Path,
        *,
        run_id: str,
        compress: int,
        segment_bytes: int,
        lost: Collection[int],
        fsync: bool,
    ) -> None:
        """`lost` are segments that are not there any more although rows refer to them; none gets such a number."""
        self._directory = directory
        self._run_id = run_id
        self._compress = compress
        self._segment_bytes = segment_bytes
        self._lost = lost
        self._fsync = fsync
        self.step = 0
        """The last step on disk, for the headers of new segments; kept up by the caller."""
        make_private(directory)
        for path in directory.glob("*.spare"):
            path.unlink()
        # A segment of an earlier process may end in bytes that no row knows of, so it is never appended to.
        self._segment = max(segments_in(directory), default=0)
        self._fd = -1
        # Without `fsync` nothing has to reach the disk soon, and what is overwritten before never has to.
        self._stage = Stage(direct=fsync)
        self._kept_end = 0
        self._unsynced: list[int] = []
        self._new_names = False
        self._spare: list[Path] = []
        self._sizes: dict[int, int] = {}
        """Of segments that are not written any more, which therefore do not change; asked for after every commit."""

    @property
    def segment(self) -> int:
        """The segment that is being written; it must not be deleted."""
        return self._segment

    @property
    def open(self) -> bool:
        """Whether the segment is this writer's own, not one that an earlier run left."""
        return self._fd >= 0

    def add(self, parts: Sequence[memoryview]) -> Place:
        """Line a payload up for the next `write`."""
        if self._fd < 0 or self._kept_end == self._stage.end >= self._segment_bytes:
            self._next_segment()
        codec = RAW
        if self._compress:
            parts, codec = [memoryview(zlib.compress(b"".join(_filled_up(parts)), self._compress))], ZLIB
        return self._append(parts, codec)

    def move(self, place: Place) -> Place:
        """Line an existing payload up again, as it is, so that its old segment can go."""
        if self._fd < 0:
            self._next_segment()
        moved = self._append([memoryview(read_stored(self._directory, place))], place.codec)
        return msgspec.structs.replace(moved, checksum=place.checksum)

    def _append(self, parts: Sequence[memoryview], codec: int) -> Place:
        offset = self._stage.end
        size, sum_of_words = self._stage.add(parts)
        return Place(self._segment, offset, size, codec, sum_of_words)

    def write(self) -> None:
        """Write what was added; on OSError nothing of it counts and `discard` makes that true on disk too."""
        self._stage.write()

    def keep(self) -> None:
        """What was written is now referred to."""
        self._kept_end = self._stage.end

    def discard(self) -> None:
        """Forget what was added since the last `keep`, and what of it was written."""
        if self._fd >= 0:
            os.ftruncate(self._fd, self._kept_end)
            self._stage.use(self._fd, self._kept_end)

    def sync(self) -> None:
        """Bring every payload written so far to disk."""
        while self._unsynced:
            os.fdatasync(self._unsynced[0])
            # Forgotten at once: if the next one fails, this number may be another file's when it is tried again.
            os.close(self._unsynced.pop(0))
        if self._fd >= 0:
            os.fdatasync(self._fd)
        if self._new_names:
            sync_file(self._directory)
            self._new_names = False

    def size_of(self, segment: int) -> int:
        """Bytes that a segment takes on disk."""
        if segment == self._segment:
            return self._stage.end
        size = self._sizes.get(segment)
        if size is None:
            size = self._sizes[segment] = segment_path(self._directory, segment).stat().st_size
        return size

    def give_back(self, segment: int) -> None:
        """Nothing refers to a segment any more, on disk either: overwrite it later, or delete it, if it is there."""
        path = segment_path(self._directory, segment)
        self._sizes.pop(segment, None)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return
        if len(self._spare) < _SPARE_SEGMENTS and size < 2 * self._segment_bytes:
            self._spare.append(path.rename(path.with_suffix(".spare")))
        else:
            path.unlink()

    def close(self) -> None:
        for fd in [*self._unsynced, self._fd]:
            if fd >= 0:
                os.close(fd)
        self._unsynced.clear()
        self._fd = -1

    def _next_segment(self) -> None:
        number = self._segment + 1
        while number in self._lost:
            number += 1
        path = segment_path(self._directory, number)
        if self._spare:
            self._spare.pop().rename(path)
        fd = open_private(path, os.O_WRONLY | os.O_CREAT)
        try:
            self._stage.use(fd, 0)
            self._stage.add([memoryview(SegmentHeader(self._run_id, number, self.step).encode())])
            self._stage.write()
        except OSError:
            # Before it is closed: its number may soon be that of another file.
            self._stage.use(self._fd, self._kept_end)
            os.close(fd)
            raise
        if self._fd >= 0:
            if self._fsync:
                self._unsynced.append(self._fd)
            else:
                os.close(self._fd)
        self._segment, self._fd, self._new_names = number, fd, True
        self._kept_end = self._stage.end


def _filled_up(parts: Sequence[memoryview]) -> list[memoryview]:
    """The parts, with zeros between them so that each starts at a multiple of 8 bytes."""
    filled = []
    for part in parts:
        filled.append(part)
        if part.nbytes % 8:
            filled.append(memoryview(bytes(-part.nbytes % 8)))
    return filled
