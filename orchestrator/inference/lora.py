"""Versions as LoRA adapters, beside the weights that an engine was started with.

Every version is loaded under a name of its own, and a rollout asks for the adapter of its first turn until it ends. So nothing
is paused and no cache is cleared: an engine keeps caches apart by the adapter's name. Replacing an adapter in place under
requests in flight is not done, because vLLM then goes on with tokens of neither: its requests remember the path that they
began with. Memory is the engine's to care for (it drops adapters that are not asked for); here only names are
forgotten, once so many newer ones have come that no rollout can want them.
"""

import asyncio
import re
from pathlib import Path

from orchestrator.inference.checkpoint import find_adapter_problem, find_base_problem
from orchestrator.inference.engine import (
    EngineApi,
    EngineAwayError,
    EngineError,
    EngineRefusedError,
    EngineUnfitError,
)
from orchestrator.inference.recipe import UpdateRequest, WeightUpdate, WeightUpdateError

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_KEPT = 32
"""Adapters that an engine keeps under their names; rollouts of older ones are long over or too old to be trained on."""
_OURS = re.compile(r".+-v\d+-[0-9a-f]{8}\Z")
_FLAGS = "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and --enable-lora --max-lora-rank RANK --max-loras 2"


def adapter_name(model: str, version: int, nonce: str) -> str:
    """The name of a version; `nonce` are eight hexadecimal digits, so that no two loads ever share a name."""
    return f"{model}-v{version}-{nonce}"


async def _apply(request: UpdateRequest) -> None:
    engine = request.engine
    if problem := await _compare_with_base(request):
        raise WeightUpdateError(f"version {request.version}: {problem}")
    body = {"lora_name": request.adapter, "lora_path": request.path}
    try:
        await engine.post(_LOAD, body=body, timeout_s=request.timeout_s)
    except EngineError as error:
        if error.status == 404 and "adapter" not in error.said.removeprefix(f"POST {_LOAD}"):
            raise _unfit(engine) from error
        raise EngineError(
            engine.url, f"adapter of version {request.version}: {error.said}", status=error.status
        ) from error
    for name in (await _loaded(engine))[:-_KEPT]:
        await engine.post(_UNLOAD, body={"lora_name": name})


async def _compare_with_base(request: UpdateRequest) -> str:
    """Why the adapter is not for the model that the engine has; empty where its folder cannot be seen from here."""
    try:
        answer = await request.engine.get("/v1/models")
    except EngineError as error:
        if error.status is None:
            raise EngineAwayError(request.engine.url, error.said) from error
        raise
    entries = answer.get("data") if isinstance(answer, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        if (
            isinstance(entry, dict)
            and entry.get("id") == request.model
            and isinstance(entry.get("root"), str)
        ):
            return await asyncio.to_thread(find_base_problem, Path(request.path or ""), Path(entry["root"]))
    return ""


async def _admit(engine: EngineApi) -> None:
    """Check that adapters can be loaded, and that those of the trainer are for the weights that the engine has."""
    try:
        # A request for nothing is refused by whoever has the call, and not found where there is none.
        await engine.post(_LOAD, body={})
    except EngineError as error:
        if error.status == 404:
            raise _unfit(engine) from error
        if error.status is None or error.status >= 500:
            raise
    label = await _base_label(engine)
    if label not in (None, "default"):
        raise EngineRefusedError(
            engine.url,
            f'has the weights "{label}" of another run where its own are needed, which adapters are added to; restart it',
        )


async def _base_label(engine: EngineApi) -> str | None:
    """The label of full weights that it was given by another way of updating; None where it cannot be asked."""
    try:
        answer = await engine.get("/weight_info")
    except EngineError as error:
        if error.status is None or error.status >= 500:
            raise
        return None
    return str(answer["weight_version"]) if isinstance(answer, dict) and "weight_version" in answer else None


async def _read_label(engine: EngineApi) -> str:
    """The adapter that was loaded last; empty where the engine has none, as after a restart."""
    return next(reversed(await _loaded(engine)), "")


async def _loaded(engine: EngineApi) -> list[str]:
    """The adapters of ours, in the order in which they were loaded."""
    return [name for name in await engine.models() if _OURS.match(name)]


def _unfit(engine: EngineApi) -> EngineUnfitError:
    return EngineUnfitError(engine.url, f"cannot be given LoRA adapters while it runs; {_FLAGS}", status=404)


VLLM_LORA = WeightUpdate(
    name="vllm_lora",
    apply=_apply,
    needs_path=True,
    admit=_admit,
    read_label=_read_label,
    find_problem=find_adapter_problem,
    adapters=True,
)
