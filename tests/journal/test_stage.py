"""The stage: payloads lie in their file as they were added, in whole blocks, past the cache where that can be done."""

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.journal import stage as staging
from orchestrator.journal.directory import open_private
from orchestrator.journal.payloads import checksum
from orchestrator.journal.stage import BLOCK_BYTES, Stage


def open_file(directory: Path) -> int:
    return open_private(directory / "segment", os.O_RDWR | os.O_CREAT)


def filled_up(part: bytes) -> bytes:
    return part + bytes(-len(part) % 8)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5 * BLOCK_BYTES), max_size=5), max_size=6), st.booleans())
def test_payloads_lie_where_they_were_added_and_have_their_sum(
    tmp_path_factory: pytest.TempPathFactory, transactions: list[list[int]], direct: bool
) -> None:
    """Whatever their sizes, also when they do not fit on the stage; every write begins and ends at a block."""
    rng = np.random.default_rng(0)
    directory = tmp_path_factory.mktemp("stage")
    fd = open_file(directory)
    expected: list[tuple[int, bytes]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_STAGE_BYTES", 2 * BLOCK_BYTES)
        stage = Stage(direct=direct)
        stage.use(fd, 0)
        for sizes in transactions:
            parts = [rng.bytes(size) for size in sizes]
            payload = b"".join(map(filled_up, parts))
            offset = stage.end
            assert offset % BLOCK_BYTES == 0
            assert stage.add([memoryview(part) for part in parts]) == (
                len(payload),
                checksum(memoryview(payload)),
            )
            stage.write()
            expected.append((offset, payload))
    os.close(fd)
    data = (directory / "segment").read_bytes()
    assert len(data) == stage.end
    for offset, payload in expected:
        assert data[offset : offset + len(payload)] == payload
        end = offset + len(payload)
        assert not any(data[end : end + -end % BLOCK_BYTES])


def test_what_was_not_written_is_forgotten_with_its_file(tmp_path: Path) -> None:
    """The stage goes on where it is told to, with nothing of before."""
    fd = open_file(tmp_path)
    stage = Stage(direct=True)
    stage.use(fd, 0)
    stage.add([memoryview(b"lost" * 100)])
    stage.use(fd, 0)
    stage.add([memoryview(b"kept")])
    stage.write()
    os.close(fd)
    assert (tmp_path / "segment").read_bytes() == b"kept".ljust(BLOCK_BYTES, b"\0")


def test_a_file_that_takes_no_write_past_the_cache_is_written_through_it(tmp_path: Path) -> None:
    """As when the device has larger blocks, or a full disk has cut a write in the middle of one."""
    fd = open_file(tmp_path)
    stage = Stage(direct=True)
    # An offset that is no multiple of a block is what such a file refuses.
    stage.use(fd, 8)
    stage.add([memoryview(b"whole" * 1000)])
    stage.write()
    assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    os.close(fd)
    assert (tmp_path / "segment").read_bytes().strip(b"\0") == b"whole" * 1000


@pytest.mark.parametrize("direct", [True, False])
def test_the_cache_is_passed_by_when_that_is_asked_for(tmp_path: Path, direct: bool) -> None:
    """Where the filesystem can do it, and whatever the file was opened with."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this filesystem knows no way past its cache")
    fd = open_file(tmp_path)
    stage = Stage(direct=direct)
    stage.use(fd, 0)
    stage.add([memoryview(b"bytes")])
    stage.write()
    assert bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT) == direct
    os.close(fd)


class SmallPages(mmap.mmap):
    """Memory of a kernel that was built without large pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_a_system_without_large_pages_is_written_from_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They only make it cheaper."""
    monkeypatch.setattr(mmap, "mmap", SmallPages)
    fd = open_file(tmp_path)
    stage = Stage(direct=True)
    stage.use(fd, 0)
    stage.add([memoryview(b"kept")])
    stage.write()
    os.close(fd)
    assert (tmp_path / "segment").read_bytes().strip(b"\0") == b"kept"
