"""Payload files: whatever single bit is flipped in a stored group, it is not taken for the one that was recorded."""

import asyncio
from pathlib import Path

import pytest

from orchestrator.journal import JournalReader
from orchestrator.journal.payloads import DamagedPayloadError
from tests.support.journal_groups import facts, make_group
from tests.support.journal_opening import open_journal


@pytest.mark.parametrize("compress", [0, 6], ids=["raw", "zlib"])
def test_every_flipped_bit_of_a_payload_is_found(tmp_path: Path, compress: int) -> None:
    """Signs of numbers included."""
    group = make_group(0, size=2, longest=12)

    async def record() -> None:
        async with open_journal(tmp_path, compress=compress) as journal:
            journal.record_group(group)

    asyncio.run(record())
    with JournalReader(tmp_path) as reader:
        (row,) = reader.group_rows()
        path = tmp_path / "journal" / "payloads" / f"{row.place.segment:08d}.bin"
        whole = path.read_bytes()
        for bit in range(8 * row.place.bytes):
            changed = bytearray(whole)
            changed[row.place.offset + bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            with pytest.raises(DamagedPayloadError):
                reader.group(row)
        path.write_bytes(whole)
        assert facts(reader.group(row)) == facts(group)
