"""What is seen of a folder of weights before an engine is asked to load it."""

import io
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.inference.checkpoint import find_foreign, find_problem
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


def write_tensors(folder: Path, tensors: object, data_bytes: int) -> None:
    header = json.dumps(tensors).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(data_bytes)
    (folder / "model.safetensors").write_bytes(content)


def leave_the_optimizer_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin"):
        (folder / name).write_bytes(b"not weights")


def leave_an_adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def shrink_a_tensor(folder: Path) -> None:
    write_tensors(folder, {"w": {"dtype": "BF16", "shape": [4, 3], "data_offsets": [0, 16]}}, 16)


def leave_a_hole(folder: Path) -> None:
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write_tensors(folder, {"a": one, "b": {**one, "data_offsets": [16, 24]}}, 24)


def overlap(folder: Path) -> None:
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write_tensors(folder, {"a": one, "b": {**one, "data_offsets": [4, 12]}}, 12)


def declare_a_huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}" * 8)


def put_a_tensor_nowhere(folder: Path) -> None:
    write_tensors(folder, {"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, float("inf")]}}, 1)


def move_a_tensor(folder: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "lm_head": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def name_a_shard_elsewhere(folder: Path) -> None:
    (folder.parent / "other.safetensors").write_bytes(safetensors())
    index = {"weight_map": {"w": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def leave_a_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 16\n"
    )


def put_a_folder_there(folder: Path) -> None:
    (folder / "model-2.safetensors").mkdir()


def put_a_pipe_there(folder: Path) -> None:
    os.mkfifo(folder / "model-2.safetensors")


def empty_torch_file(folder: Path) -> None:
    (folder / "pytorch_model.bin").touch()


def cut_torch_file(folder: Path) -> None:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(500))
    (folder / "pytorch_model.bin").write_bytes(whole.getvalue()[:-60])


def answer_with_a_page(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_text("<html>404</html>")


def put_another_archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("README.md", "a note")


def cut_old_torch_file(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"w": list(range(100))}, protocol=2)[:-20])


def lose_shards_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def put_a_foreign_file(folder: Path) -> None:
    (folder / "model.gguf").write_text("<html>404</html>")


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
        (leave_the_optimizer_alone, "holds no weights"),
        (leave_an_adapter, "is a LoRA adapter, not the weights of a model"),
        (shrink_a_tensor, r'has 16 bytes of tensor "w" where its shape and type need 24'),
        (leave_a_hole, r'cannot be right: tensor "b" lies at 16 to 24'),
        (overlap, r'cannot be right: tensor "b" lies at 4 to 12'),
        (declare_a_huge_header, r"model\.safetensors is cut short or no safetensors file"),
        (put_a_tensor_nowhere, r"has a header that cannot be read"),
        (move_a_tensor, r'model\.safetensors has no tensor "lm_head", which .*index\.json says is there'),
        (name_a_shard_elsewhere, r"lacks \.\./other\.safetensors"),
        (leave_a_pointer, r"is a pointer of Git LFS"),
        (put_a_folder_there, r"model-2\.safetensors is not a file"),
        (put_a_pipe_there, r"model-2\.safetensors is not a file"),
        (empty_torch_file, r"pytorch_model\.bin is empty"),
        (cut_torch_file, r"pytorch_model\.bin is cut short"),
        (put_a_foreign_file, r"model\.gguf is no GGUF file"),
        (answer_with_a_page, r"pytorch_model\.bin is no file of torch"),
        (put_another_archive, r"pytorch_model\.bin is an archive, but none of torch"),
        (cut_old_torch_file, r"pytorch_model\.bin is cut short"),
        (
            lose_shards_without_an_index,
            r"has 1 of the 2 files model-…-of-00002\.safetensors",
        ),
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
    (folder / "model-2.safetensors").write_bytes(safetensors(0, "b"))
    (folder / "config.json").write_text("{}")
    shards = {"w": "model.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert find_problem(folder) == ""


def test_what_a_trainer_saves_beside_the_weights_is_not_looked_at(tmp_path: Path) -> None:
    """An engine does not read it either."""
    folder = folder_of_weights(tmp_path)
    (folder / "optimizer.pt").write_bytes(b"PK cut short")
    (folder / "training_args.bin").write_bytes(b"")
    (folder / "README.md").write_text("a note")
    assert find_problem(folder) == ""


def test_files_of_torch_pass(tmp_path: Path) -> None:
    """An archive as torch writes it today, and a pickle as it did before."""
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", bytes(500))
    (tmp_path / "old.pt").write_bytes(b"\x80\x02}q\x00.")
    assert find_problem(tmp_path) == ""


def model(parent: Path, name: str, tensors: Mapping[str, tuple[str, list[int]]]) -> Path:
    folder = parent / name
    folder.mkdir()
    header, end = {}, 0
    for tensor, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * {"F32": 4, "BF16": 2}[dtype]
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    write_tensors(folder, header, end)
    assert find_problem(folder) == ""
    return folder


BEFORE = {"embed": ("F32", [8, 4]), "layers.0": ("F32", [4, 4]), "lm_head.weight": ("F32", [8, 4])}


@pytest.mark.parametrize(
    ("now", "said", "in_model_folder"),
    [
        (BEFORE, "", ""),
        ({name: ("BF16", shape) for name, (_, shape) in BEFORE.items()}, "", ""),
        ({name: BEFORE[name] for name in ("embed", "layers.0")}, "", ""),
        (
            {**BEFORE, "layers.0": ("F32", [4, 2])},
            r'"layers.0" is \[4, 2\], .* \[4, 4\]',
            "is of another model",
        ),
        ({**BEFORE, "layers.1": ("F32", [4, 4])}, r'before has no "layers.1"', ""),
        ({name: BEFORE[name] for name in ("embed", "lm_head.weight")}, r'now has no "layers.0"', ""),
    ],
)
def test_weights_of_another_model_are_known_by_their_tensors(
    tmp_path: Path, now: dict[str, tuple[str, list[int]]], said: str, in_model_folder: str
) -> None:
    """Compared with the version before, names and shapes; with the model's own folder, which may name them in another way, shapes. Types may change,
    and a tensor that stands for two may be left out once."""
    before, folder = model(tmp_path, "before", BEFORE), model(tmp_path, "now", now)
    for same_names, expected in ((True, said), (False, in_model_folder)):
        found = find_foreign(folder, before, same_names=same_names)
        assert re.search(expected, found) if expected else not found
    assert find_foreign(folder, tmp_path / "gone", same_names=True) == ""


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 200), flipped=st.none() | st.tuples(st.integers(0, 40), st.integers(1, 255)))
def test_no_bytes_are_too_odd_to_be_looked_at(
    tmp_path: Path, cut: int, flipped: tuple[int, int] | None
) -> None:
    """Whatever was written, there is an answer; a file that is cut anywhere is never whole."""
    content = bytearray(safetensors(100)[: len(safetensors(100)) - cut])
    if flipped is not None and flipped[0] < len(content):
        content[flipped[0]] ^= flipped[1]
    (tmp_path / "model.safetensors").write_bytes(content)
    problem = find_problem(tmp_path)
    if flipped is None:
        assert bool(problem) == (cut > 0)


def test_a_folder_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    """A name that nothing has, and a file where a folder should be."""
    (tmp_path / "file").write_text("")
    assert find_problem(tmp_path / "gone") == f"{tmp_path / 'gone'} is not a folder"
    assert find_problem(tmp_path / "file") == f"{tmp_path / 'file'} is not a folder"
