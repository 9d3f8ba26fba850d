"""What a service writes beside its journal."""

from pathlib import Path

import pytest

from orchestrator.errors import JournalError
from orchestrator.service.service import write_json


def test_a_summary_that_the_disk_does_not_take_is_one_line_and_has_an_exit_code(tmp_path: Path) -> None:
    """A full disk at the end of a run is not a bug of ours: no traceback, and the code of the run directory."""
    (tmp_path / "summary.part").symlink_to("/dev/full")
    with pytest.raises(JournalError, match=r"summary\.json: cannot be written: No space left on device"):
        write_json(tmp_path / "summary.json", {"steps": 3})
    assert not (tmp_path / "summary.json").exists()
