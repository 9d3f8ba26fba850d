"""Looks at a folder of weights before an engine is asked to load it.

An engine that is given a folder that is not there, or a file that was cut short, answers first and dies at its
next request; so names, headers and sizes are looked at here: every file of weights is a whole file of its kind, every
tensor lies where its header says and has the bytes that its shape needs, and every shard that an index names is there with the
tensors that it should have. Weights of another model than the one before are refused, because engines may take them without a word. A LoRA adapter has its configuration beside it, and both halves of every layer in the rank that it says. Tensors are not read: the cost is a header a file. Blocking; callers leave the event loop.
"""

import json
import math
import pickletools
import re
import stat
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_OTHER_FILES = ("optimizer*", "scheduler*", "scaler*", "rng_state*", "training_args*")
"""What trainers save beside the weights, under the same endings."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # what the format allows
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_HALF = ".lora_A.weight"
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What JSON of another shape raises."""
_POINTER = b"version https://git-lfs"
_SHARD = re.compile(r"^(?P<stem>.*)-\d{5}-of-(?P<parts>\d{5})(?P<ending>\.\w+)$")
_TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""One of them may be left out where the model has one tensor for both."""
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Of the types of safetensors that take whole bytes; sizes of others are not looked at."""


Shapes = Mapping[str, tuple[int, ...]]


class _Damaged(Exception):  # noqa: N818  carries what is said of a file
    """A file that an engine cannot load."""


def find_problem(folder: Path) -> str:
    """Why the folder cannot be loaded, empty if nothing speaks against it."""
    try:
        if not folder.is_dir():
            return f"{folder} is not a folder"
        files = {path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)}
        files -= {path for pattern in _OTHER_FILES for path in folder.glob(pattern)}
        if files and all(path.name in _ADAPTER_FILES for path in files):
            return f'{folder} is a LoRA adapter, not the weights of a model; set inference.weight_update = "vllm_lora"'
        if not files:
            return f"{folder} holds no weights ({', '.join(_WEIGHT_FILES)})"
        tensors: dict[str, Shapes] = {}
        for path in sorted(files):
            try:
                tensors[path.name] = _tensors_in(path)
            except _Damaged as damage:
                return f"{path} {damage}"
        for index in sorted(folder.glob("*.index.json")):
            if problem := _compare(index, tensors):
                return problem
        if problem := _missing_shards(tensors):
            return f"{folder} {problem}"
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror or error})"
    return ""


def find_foreign(folder: Path, before: Path, *, same_names: bool) -> str:
    """Where the weights of a folder are of another model than those at `before`; empty where that cannot be seen.

    Types may differ. Without `same_names` only tensors that both have are compared: those of a model's own folder may be named in another way.
    """
    try:
        new, old = _all_tensors(folder), _all_tensors(before)
    except (OSError, _Damaged):
        return ""
    if not new or not old:
        return ""  # files of torch do not tell
    for name, shape in new.items():
        if name in old and old[name] != shape:
            return f'{folder} is of another model: its "{name}" is {list(shape)}, that of {before} {list(old[name])}'
    if same_names:
        for one, other, without in ((old, new, folder), (new, old, before)):
            missing = sorted(name for name in one if name not in other and not name.endswith(_TIED))
            if missing:
                return f'{folder} is of another model than {before}: {without} has no "{missing[0]}"'
    return ""


def find_adapter_problem(folder: Path) -> str:
    """Why the folder cannot be loaded as a LoRA adapter, empty if nothing speaks against it."""
    try:
        if not folder.is_dir():
            return f"{folder} is not a folder"
        settings = folder / _ADAPTER_CONFIG
        if not settings.is_file():
            return f"{folder} is no LoRA adapter: it has no {_ADAPTER_CONFIG}"
        try:
            config: dict[str, Any] = json.loads(settings.read_bytes())
            kind, rank, varies = config["peft_type"], config["r"], bool(config.get("rank_pattern"))
        except _MALFORMED:
            return f"{settings} is not the configuration of an adapter"
        if kind != "LORA" or type(rank) is not int or rank < 1:
            return f"{settings} says peft_type {kind!r} and r {rank!r}; it must be LORA with a rank above 0"
        path = next(filter(Path.exists, (folder / name for name in _ADAPTER_FILES)), None)
        if path is None:
            return f"{folder} holds no adapter ({' or '.join(_ADAPTER_FILES)})"
        try:
            shapes = _tensors_in(path)
        except _Damaged as damage:
            return f"{path} {damage}"
        if path.suffix == ".safetensors" and (problem := _misfit(shapes, None if varies else rank)):
            return f"{path} {problem}"
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror or error})"
    return ""


def find_base_problem(adapter: Path, base: Path) -> str:
    """Which layer of an adapter has another size than in the model at `base`; empty where that cannot be seen.

    Engines may take a smaller one without a word, and sample from something that nobody has trained.
    """
    try:
        halves = _tensors_in(adapter / _ADAPTER_FILES[0])
        sizes = {
            name: shape for path in base.glob("*.safetensors") for name, shape in _tensors_in(path).items()
        }
    except (OSError, _Damaged):
        return ""
    for name, (_, wide) in ((name, shape) for name, shape in halves.items() if name.endswith(_HALF)):
        layer = name.removesuffix(_HALF)
        size = sizes.get(f"{layer.removeprefix('base_model.model.')}.weight")
        high = halves.get(f"{layer}.lora_B.weight", (0,))[0]
        # A quantised model has several numbers in one of another size, whose count says nothing.
        if size is not None and size != (high, wide) and not _is_quantised(base):
            return f'{adapter} is for another model: its "{layer}" is {high} x {wide}, that of {base} {size[0]} x {size[-1]}'
    return ""


def _is_quantised(base: Path) -> bool:
    """Whether a model's folder says that its weights are packed; one that says nothing is taken as it is."""
    if (base / "hf_quant_config.json").is_file():
        return True
    try:
        return "quantization_config" in json.loads((base / "config.json").read_bytes())
    except (OSError, *_MALFORMED):
        return False


def _misfit(shapes: Shapes, rank: int | None) -> str:
    """What is wrong with the tensors of an adapter; `rank` is None where it is another for each layer."""
    found: dict[str, dict[str, int]] = {}
    for name, shape in shapes.items():
        for part, axis in (("lora_A", 0), ("lora_B", 1)):
            if f".{part}." in name:
                if len(shape) != 2:
                    return f'has tensor "{name}" of shape {list(shape)}; it must have two axes'
                if rank is not None and shape[axis] != rank:
                    return f'has tensor "{name}" of rank {shape[axis]} where {_ADAPTER_CONFIG} says {rank}'
                found.setdefault(name.replace(part, "lora_?"), {})[part] = shape[axis]
    if not found:
        return "holds no tensor of a LoRA adapter (…lora_A.weight, …lora_B.weight)"
    for name, ranks in found.items():
        if len(ranks) != 2:
            return f'has only one half of "{name}"'
        if ranks["lora_A"] != ranks["lora_B"]:
            return f'has halves of "{name}" of different ranks: {ranks["lora_A"]} and {ranks["lora_B"]}'
    return ""


def _compare(index: Path, tensors: Mapping[str, Shapes]) -> str:
    """What an index of shards names and its folder does not have."""
    try:
        places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        shards = set(places.values())
        missing = sorted(name for name in shards if name not in tensors)
    except _MALFORMED:
        return f"{index} is not an index of weights"
    if missing:
        return f"{index.parent} lacks {', '.join(missing[:5])}, which {index.name} names"
    for tensor, shard in places.items():
        if shard.endswith(".safetensors") and tensor not in tensors[shard]:
            return f'{index.parent / shard} has no tensor "{tensor}", which {index.name} says is there'
    return ""


def _missing_shards(names: Iterable[str]) -> str:
    """Which files of weights say that they are one of several that are not all there; with an index or without."""
    found: dict[tuple[str, str, str], int] = {}
    for name in names:
        if match := _SHARD.match(name):
            of = match["stem"], match["parts"], match["ending"]
            found[of] = found.get(of, 0) + 1
    for (stem, parts, ending), there in found.items():
        if there < int(parts):
            return f"has {there} of the {int(parts)} files {stem}-…-of-{parts}{ending}"
    return ""


def _all_tensors(folder: Path) -> Shapes:
    return {name: shape for path in folder.glob("*.safetensors") for name, shape in _tensors_in(path).items()}


def _tensors_in(path: Path) -> Shapes:
    """The shapes of a file's tensors, where its kind tells them without reading it; _Damaged if it is not whole."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise _Damaged("is not a file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path, facts.st_size)
    with path.open("rb") as file:
        first = file.read(len(_POINTER))
    if not first:
        raise _Damaged("is empty")
    _refuse_pointer(first)
    if path.suffix == ".gguf" and not first.startswith(b"GGUF"):
        raise _Damaged("is no GGUF file")
    if path.suffix != ".gguf":
        _look_at_torch(path, first, facts.st_size)
    return {}


def _look_at_torch(path: Path, first: bytes, size: int) -> None:
    """A file of torch is a zip archive, whose table of contents is at its end, or, from versions before 1.6, a pickle and what follows it."""
    if first.startswith(b"PK"):
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except (zipfile.BadZipFile, *_MALFORMED) as error:
            raise _Damaged(f"is cut short ({size} bytes, and no table of contents at the end)") from error
        if not any(name.endswith("data.pkl") for name in names):
            raise _Damaged("is an archive, but none of torch")
        return
    if not first.startswith(b"\x80"):
        raise _Damaged("is no file of torch")
    with path.open("rb") as file:
        try:
            for _ in pickletools.genops(file):
                pass
        except (EOFError, *_MALFORMED) as error:
            raise _Damaged(f"is cut short ({size} bytes, and not even its first pickle ends)") from error


def _read_safetensors(path: Path, size: int) -> Shapes:
    """8 bytes with the header's length, the header in JSON, the data."""
    with path.open("rb") as file:
        first = file.read(len(_POINTER))
        _refuse_pointer(first)
        length = int.from_bytes(first[:_LENGTH_BYTES], "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise _Damaged(
                f"is cut short or no safetensors file ({size} bytes, not even its header is whole)"
            )
        file.seek(_LENGTH_BYTES)
        header = file.read(length)
    try:
        tensors: dict[str, Any] = json.loads(header)
        tensors.pop("__metadata__", None)
        spans = sorted((int(begin), int(end), name) for name, (begin, end) in _offsets(tensors))
        needed = {name: _bytes_of(entry) for name, entry in tensors.items()}
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
    except _MALFORMED as error:
        raise _Damaged("has a header that cannot be read") from error
    expected = _LENGTH_BYTES + length + max((end for _, end, _ in spans), default=0)
    if size != expected:
        raise _Damaged(f"has {size} bytes where its header says {expected}")
    place = 0
    for begin, end, name in spans:
        if begin != place or end < begin:
            raise _Damaged(f'has a header that cannot be right: tensor "{name}" lies at {begin} to {end}')
        place = end
        if needed[name] is not None and end - begin != needed[name]:
            raise _Damaged(
                f'has {end - begin} bytes of tensor "{name}" where its shape and type need {needed[name]}'
            )
    return shapes


def _offsets(tensors: Mapping[str, Any]) -> list[tuple[str, tuple[int, int]]]:
    return [(name, tuple(entry["data_offsets"])) for name, entry in tensors.items()]


def _bytes_of(entry: Mapping[str, Any]) -> int | None:
    item_bytes = _ITEM_BYTES.get(entry["dtype"])
    return None if item_bytes is None else math.prod(map(int, entry["shape"])) * item_bytes


def _refuse_pointer(first: bytes) -> None:
    if first.startswith(_POINTER):
        raise _Damaged("is a pointer of Git LFS, not the weights themselves")
