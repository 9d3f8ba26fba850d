"""What is seen of a folder of weights before an engine is asked to load it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.inference.checkpoint import find_problem
from tests.support.inference_engine import folder_of_weights, safetensors


def shorten(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(safetensors()[:-1])


def lengthen(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(safetensors() + b"x")


def cut_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(safetensors()[:20])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def spoil_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{{{{")


def other_header(folder: Path) -> None:
    header = b'{"w": {"dtype": "U8"}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def lose_a_shard(folder: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def spoil_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "notes.txt")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shorten, r"model\.safetensors has \d+ bytes where its header says \d+"),
        (lengthen, r"model\.safetensors has \d+ bytes where its header says \d+"),
        (cut_header, r"model\.safetensors is cut short"),
        (empty, r"model\.safetensors is cut short"),
        (spoil_header, r"model\.safetensors has a header that cannot be read"),
        (other_header, r"model\.safetensors has a header that cannot be read"),
        (lose_a_shard, r"lacks model-2\.safetensors, which model\.safetensors\.index\.json names"),
        (spoil_index, r"model\.safetensors\.index\.json is not an index of weights"),
        (remove_weights, r"holds no weights"),
    ],
)
def test_damage_is_named_with_the_file(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    """Whatever would kill an engine is found before, and said with the file that has it."""
    folder = folder_of_weights(tmp_path)
    assert find_problem(folder) == ""
    damage(folder)
    assert re.search(said, find_problem(folder))


def test_a_whole_checkpoint_in_shards_passes(tmp_path: Path) -> None:
    """Nothing is said about a folder that an engine can load, other files included."""
    folder = folder_of_weights(tmp_path)
    (folder / "model-2.safetensors").write_bytes(safetensors(0))
    (folder / "config.json").write_text("{}")
    shards = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert find_problem(folder) == ""


def test_a_folder_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    """A name that nothing has, and a file where a folder should be."""
    (tmp_path / "file").write_text("")
    assert find_problem(tmp_path / "gone") == f"{tmp_path / 'gone'} is not a folder"
    assert find_problem(tmp_path / "file") == f"{tmp_path / 'file'} is not a folder"
