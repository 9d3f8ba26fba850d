"""A way for vLLM's own weight-transfer endpoints to work without a GPU: tensors go through a store in the trainer's process.

vLLM's backends need NCCL or CUDA. This one is named to the engine with `--worker-extension-cls` (importing it registers it)
and `--weight-transfer-config`; everything but the transport is vLLM's: the endpoints, the layerwise reload, the states.
As a command, `cpu_transfer.py FOLDER URL ...` is the trainer's side: it sends the weights of a folder to engines
that stand still. Both run in the engine's own virtualenv.
"""
# The engine's libraries are not installed where the project is type-checked:
# mypy: ignore-errors

import json
import socket
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


@dataclass
class StoreInitInfo(WeightTransferInitInfo):
    """Where the trainer's store is, and which of its members this engine is."""

    address: str
    port: int
    rank: int
    world_size: int


class StoreTransfer(NCCLWeightTransferEngine):
    """As with NCCL, but every tensor comes through the store."""

    init_info_cls = StoreInitInfo

    def init_transfer_engine(self, init_info: StoreInitInfo) -> None:
        self._group = StatelessProcessGroup.create(
            init_info.address, init_info.port, init_info.rank, init_info.world_size
        )

    def update_weights(self, update_info: dict) -> None:
        update = self.parse_update_info(update_info)
        for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
            tensor = self._group.broadcast(torch.empty(shape, dtype=getattr(torch, dtype)), src=0)
            self.model.load_weights([(name, tensor)])

    def shutdown(self) -> None:
        self._group = None


class Extension:
    """Nothing: to name it is to have this module imported where the engine computes."""


if __name__ != "__main__":
    WeightTransferEngineFactory.register_engine("store", StoreTransfer)


def post(url: str, path: str, body: dict) -> None:
    asked = urllib.request.Request(
        url.removesuffix("/v1") + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        answer.read()


def send(folder: Path, urls: list[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    info = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    with ThreadPoolExecutor(len(urls)) as threads:
        size = len(urls) + 1
        joins = [
            {"init_info": {"address": "127.0.0.1", "port": port, "rank": rank, "world_size": size}}
            for rank in range(1, size)
        ]
        joining = threads.map(lambda url, body: post(url, "/init_weight_transfer_engine", body), urls, joins)
        group = StatelessProcessGroup.create("127.0.0.1", port, 0, size)
        list(joining)
        list(threads.map(lambda url: post(url, "/start_weight_update", {}), urls))
        updating = threads.map(lambda url: post(url, "/update_weights", {"update_info": info}), urls)
        for tensor in tensors.values():
            group.broadcast(tensor, src=0)
        list(updating)
        list(threads.map(lambda url: post(url, "/finish_weight_update", {}), urls))


if __name__ == "__main__":
    send(Path(sys.argv[1]), sys.argv[2:])
