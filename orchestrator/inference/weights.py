"""How an engine gets new weights: recipes by name, each a few calls to one server.

A recipe changes one engine and raises if it did not get there; the pool decides when, to which engines, and
what becomes of one that failed. Requests in flight survive an update of vLLM: they freeze, and go on with the new
weights and a cleared cache (without clearing, cached prefixes of the old weights give wrong tokens). Those of SGLang are asked again.

A recipe never leaves an engine paused: resuming is in a `finally`, bounded by its own timeout. When the load
itself failed the weights are unknown, so the requests in flight are aborted first; an aborted request ends as
"abort" and is asked again elsewhere instead of going on with garbage.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import structlog

from envs.errors import shown_url
from envs.importing import ImportReferenceError, import_attribute
from orchestrator.errors import ConfigError
from orchestrator.inference.engine import EngineApi, EngineAwayError, EngineError, EngineUnfitError
from orchestrator.inference.lora import VLLM_LORA
from orchestrator.inference.recipe import UpdateRequest, WeightUpdate, WeightUpdateError

log = structlog.get_logger(__name__)

T = TypeVar("T")

_PAUSE_PART = 0.5
"""Of the time for an update, what a pause may take. If all of it ran out first, nobody could tell that the engine was never
asked to load anything, and the weights would be blamed; and what undoes the pause needs time too."""

_RECOVERY_TIMEOUT_S = 15.0


def build_weight_update(spec: str) -> WeightUpdate:
    """The recipe named `none`, `vllm`, `vllm_lora`, `trainer` or `sglang`, or the one at "module:attr"."""
    recipe = _RECIPES.get(spec)
    if recipe is not None:
        return recipe
    if ":" not in spec:
        names = ", ".join(_RECIPES)
        raise ConfigError(f'inference.weight_update: "{spec}" is not one of {names} nor "module:attr"')
    try:
        found = import_attribute(spec, what="inference.weight_update:")
    except ImportReferenceError as error:
        raise ConfigError(str(error)) from error
    if isinstance(found, WeightUpdate):
        return _guarded(found)
    if not callable(found):
        raise ConfigError(
            f'inference.weight_update: "{spec}" is of type {type(found).__name__}; '
            f"it must be an async function that takes an UpdateRequest, or a WeightUpdate"
        )
    return WeightUpdate(name=spec, apply=found)


def _guarded(recipe: WeightUpdate) -> WeightUpdate:
    """A user's own recipe: whatever its code raises speaks against one engine or one folder, and does not end the run.

    `apply` is the sync's to guard.
    """

    def on_engine(
        call: Callable[[EngineApi], Awaitable[T]] | None, what: str
    ) -> Callable[[EngineApi], Awaitable[T]] | None:
        if call is None:
            return None

        async def guarded(engine: EngineApi) -> T:
            try:
                return await call(engine)
            except EngineError:
                raise
            except Exception as error:
                said = f"{what} of weight update {recipe.name} raised {type(error).__name__}: {error}"
                raise EngineError(engine.url, said) from error

        return guarded

    def find_problem(folder: Path) -> str:
        try:
            return recipe.find_problem(folder)
        except Exception as error:  # noqa: BLE001  see above
            return f"{folder} cannot be looked at: find_problem of weight update {recipe.name} raised {type(error).__name__}: {error}"

    return replace(
        recipe,
        admit=on_engine(recipe.admit, "admit"),
        read_label=on_engine(recipe.read_label, "read_label"),
        find_problem=find_problem,
    )


SENT = "(sent by the trainer)"
"""In place of the path of a version that has none, because it was sent; of some, with who sent it behind."""


def sent_by(life: str) -> str:
    """In place of the path of a version that was sent in this life of a run: the same number is another version in another."""
    return f"{SENT} {life}"


def is_sent(path: str | None) -> bool:
    """Whether a version has no path because it was sent."""
    return path is not None and path.startswith(SENT)


def sent_label(version: int, path: str | None) -> str:
    """The label of an engine that was sent a version."""
    return f"{version}{(path or '').removeprefix(SENT)}"


async def check_weights(
    update: WeightUpdate, version: int, path: str | None, *, local: bool, remedy: str
) -> str | None:
    """The path as engines are to be given it; WeightUpdateError, with the remedy, if it cannot be loaded.

    Asking an engine to load a folder that is not there ends the engine, so the folder is looked at first.
    `local` is False where engines see other folders than this process.
    """
    if update.sent and not is_sent(path):
        raise WeightUpdateError(
            f'version {version} was published, but with weight_update = "trainer" the trainer sends versions itself: '
            f"with trainer.updating({version}) as engines, and nothing is published"
        )
    if path is None:
        if update.needs_path:
            raise WeightUpdateError(
                f'version {version} was published without a path, but weight_update = "{update.name}" loads from a path; '
                f"publish with path=…"
            )
        return None
    if not update.needs_path or not local:
        return path
    found, problem = await asyncio.to_thread(_look_at, path, update.find_problem)
    if problem:
        raise WeightUpdateError(f"version {version}: {problem}; {remedy}")
    return found


def _look_at(path: str, find_problem: Callable[[Path], str]) -> tuple[str, str]:
    try:
        # Absolute, because the engine's working directory is not ours.
        folder = Path(path).expanduser().absolute()
        return str(folder), find_problem(folder)
    except (RuntimeError, ValueError) as error:  # a home of nobody, a name that no file can have
        return path, f"{path!r} is not a folder ({error})"


async def _apply_none(request: UpdateRequest) -> None:
    """The trainer updates the engines itself, or nothing does: versions are only counted."""


@asynccontextmanager
async def _paused(
    engine: EngineApi,
    *,
    pause: Callable[[], Awaitable[object]],
    abort: Callable[[], Awaitable[object]],
    resume: str,
) -> AsyncIterator[None]:
    """Pause around a load. Whatever happens the engine is resumed; after a failed load its requests are aborted."""
    loaded = False
    refused = False
    try:
        try:
            await pause()
        except EngineError as error:
            refused = error.status == 404  # there is no such call, so nothing was paused
            if error.status is None:
                raise EngineAwayError(engine.url, error.said) from error
            raise
        yield
        loaded = True
    finally:
        if not refused:
            await _resume(engine, abort=None if loaded else abort, resume=resume)


async def _resume(engine: EngineApi, *, abort: Callable[[], Awaitable[object]] | None, resume: str) -> None:
    if abort is None:
        await engine.post(resume, timeout_s=_RECOVERY_TIMEOUT_S)
        return
    try:
        async with asyncio.timeout(_RECOVERY_TIMEOUT_S):
            await abort()
            await engine.post(resume)
    except (EngineError, TimeoutError) as error:
        # The load's own failure is the one to report; the pool takes the engine out either way.
        log.warning("weights.resume_failed", endpoint=shown_url(engine.url), error=str(error) or "timed out")


async def _apply_vllm(request: UpdateRequest) -> None:
    """Freeze, clear the caches, reload, label, go on."""
    engine, timeout_s = request.engine, request.timeout_s

    async def pause() -> None:
        query = {"mode": "keep", "clear_cache": "true"}
        await engine.post("/pause", query=query, timeout_s=_PAUSE_PART * timeout_s)

    async def abort() -> None:
        await engine.post("/pause", query={"mode": "abort"})

    with _dev_mode_explained():
        async with _paused(engine, pause=pause, abort=abort, resume="/resume"):
            load = {"method": "reload_weights", "kwargs": {"weights_path": request.path}}
            await engine.post("/collective_rpc", body=load, timeout_s=timeout_s)
            try:
                await engine.post("/update_weight_version", body={"new_version": str(request.version)})
            except EngineError as error:
                if error.status != 404:  # engines older than the label have no way to be asked for it either
                    raise


async def _admit_vllm(engine: EngineApi) -> None:
    """Check for the administrative calls; go on where a service that was killed during an update left a pause."""
    with _dev_mode_explained():
        answer = await engine.get("/is_paused")
    if isinstance(answer, dict) and answer.get("is_paused"):
        log.warning("endpoint.resumed", endpoint=shown_url(engine.url), reason="it was found paused")
        await engine.post("/resume")


async def _admit_sent(engine: EngineApi) -> None:
    """As for vLLM; without labels nobody could say who has the version that the trainer has sent."""
    await _admit_vllm(engine)
    if await _read_label_vllm(engine) is None:
        raise EngineUnfitError(
            engine.url,
            'does not say which weights it has (no /weight_info), which weight_update = "trainer" needs; use a later vLLM',
        )


async def _read_label_vllm(engine: EngineApi) -> str | None:
    try:
        answer = await engine.get("/weight_info")
    except EngineError as error:
        if error.status == 404:
            return None
        raise
    return str(answer["weight_version"]) if isinstance(answer, dict) and "weight_version" in answer else None


@contextmanager
def _dev_mode_explained() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        if error.status != 404:
            raise
        raise EngineUnfitError(
            error.url,
            "has no administrative endpoints, so its weights cannot be updated; start vLLM with VLLM_SERVER_DEV_MODE=1 "
            'in its environment, or set inference.weight_update = "none"',
            status=404,
        ) from error


async def _apply_sglang(request: UpdateRequest) -> None:
    """Abort what runs, so that it is asked again, load with the cache flushed, go on. Written by SGLang's documentation, untried."""
    engine, timeout_s = request.engine, request.timeout_s

    async def pause() -> None:
        # A load ends SGLang's scheduler if the cache cannot be flushed after it, and that needs an engine without any request. "in_place"
        # keeps them running and "retract" puts them into the queue, so only "abort", which waits until the last is gone, is safe.
        await engine.post("/pause_generation", body={"mode": "abort"}, timeout_s=_PAUSE_PART * timeout_s)

    async def abort() -> None:
        await engine.post("/abort_request", body={"abort_all": True})

    async with _paused(engine, pause=pause, abort=abort, resume="/continue_generation"):
        load = {"model_path": request.path, "weight_version": str(request.version), "flush_cache": True}
        answer = await engine.post("/update_weights_from_disk", body=load, timeout_s=timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(engine.url, f"POST /update_weights_from_disk failed: {answer.get('message')}")


async def _admit_sglang(engine: EngineApi) -> None:
    """Go on where a service that was killed during an update left a pause; going on without one does nothing."""
    try:
        await engine.post("/continue_generation")
    except EngineError as error:
        if error.status != 404:
            raise
        raise EngineUnfitError(
            error.url,
            "has no /continue_generation, so its weights cannot be updated under load; use an SGLang that has it, "
            'or set inference.weight_update = "none"',
            status=404,
        ) from error


async def _read_label_sglang(engine: EngineApi) -> str | None:
    for path in ("/model_info", "/get_model_info"):  # the second is the name in older servers
        try:
            answer = await engine.get(path)
        except EngineError as error:
            if error.status != 404:
                raise
        else:
            return (
                str(answer["weight_version"])
                if isinstance(answer, dict) and "weight_version" in answer
                else None
            )
    return None


_RECIPES = {
    "none": WeightUpdate(name="none", apply=_apply_none),
    "vllm": WeightUpdate(
        name="vllm", apply=_apply_vllm, needs_path=True, admit=_admit_vllm, read_label=_read_label_vllm
    ),
    "vllm_lora": VLLM_LORA,
    "trainer": WeightUpdate(
        name="trainer", apply=_apply_none, admit=_admit_sent, read_label=_read_label_vllm, sent=True
    ),
    "sglang": WeightUpdate(
        name="sglang",
        apply=_apply_sglang,
        needs_path=True,
        admit=_admit_sglang,
        read_label=_read_label_sglang,
    ),
}
