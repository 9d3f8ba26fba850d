"""A run inside somebody's own program: `async with orchestrator.running(config) as run`.

The body is the trainer. The service runs in a task beside it, in the event loop that is there, and is gone when the block
is left: no signal handler, no loop policy, no task, thread or process stays. Journal and leases are those of
`orchestrator run`: a batch is acknowledged when the next one is asked for, when `acknowledge` says so, or when the block
is left without an exception; one that was not comes again when the run goes on. An error of the run is raised in
whatever the body awaits of it, or else at the end of the block.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import structlog

from envs.logs import log_to
from orchestrator.config import Config, find_warnings, resolve_config
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.facts import Status
from orchestrator.service import blueprint, secrets
from orchestrator.service.log_file import note, open_log
from orchestrator.service.service import Service
from orchestrator.service.starting import start_service
from orchestrator.trainer.batch import TrainingBatch
from orchestrator.trainer.conversation import Publication
from orchestrator.trainer_link.inside import InsideClient, InsideLink

log = structlog.get_logger()

T = TypeVar("T")


class EmbeddedRun:
    """A run that goes on while the body runs. `summary` is there once the block was left and the run was saved."""

    def __init__(self, service: Service, client: InsideClient, serving: asyncio.Task[str]) -> None:
        self._service = service
        self._client = client
        self._serving = serving
        self._asking = False
        self._left = False
        self.summary: dict[str, Any] | None = None

    @property
    def run_dir(self) -> Path:
        """Where the journal, the logs and the summary are."""
        return self._service.config.run_dir

    @property
    def http_address(self) -> str | None:
        """Where the status can be read, if HTTP is enabled."""
        return self._service.http_address

    @property
    def ended(self) -> str:
        """Why the run is over; empty while it is not, and where it ended in an error."""
        return self._service.run.ended

    def status(self) -> Status:
        """The run at this moment, as `orchestrator status` shows it."""
        return self._service.status()

    def batches(self) -> AsyncIterator[TrainingBatch]:
        """The batches, in order, until the run is over; asking for the next acknowledges the one before."""
        return _Batches(self)

    async def next_batch(self) -> TrainingBatch | None:
        """Acknowledge the batch in hand and wait for the next one; None when the run is over."""
        if self._asking:
            raise RuntimeError("a batch is waited for already; one coroutine at a time may do that")
        self._asking = True
        came: list[TrainingBatch] = []

        async def ask() -> TrainingBatch | None:
            batch = await self._client.next_batch()
            if batch is not None:
                came.append(batch)
            return batch

        try:
            return await self._while_serving(ask(), outlives=True)
        except asyncio.CancelledError:
            # One that came in this very moment was seen by nobody: it is to come again, and not to be acknowledged.
            for batch in came:
                self._client.resume_after(batch.step - 1)
            raise
        finally:
            self._asking = False

    async def acknowledge(self, batch: TrainingBatch) -> None:
        """The batch is done with and will not come again; returns once that is recorded."""
        await self._while_serving(self._client.ack(batch.step), outlives=True)

    async def publish(
        self, version: int, path: str | Path | None = None, *, wait_s: float = 0.0
    ) -> Publication:
        """A version can be sampled from, at `path`; TrainerLinkError with the reason when it cannot be loaded.

        Returns once it is recorded; the inference servers load it while the run goes on. With `wait_s` it returns when all of
        them have it or are out of service, at the latest after that time. Repeating a version or going back changes
        nothing, and the note says so.
        """
        shown = None if path is None else str(path)
        return await self._while_serving(self._client.publish(version, shown, wait_s=wait_s), outlives=False)

    @asynccontextmanager
    async def updating(self, version: int, *, wait_s: float = 0.0) -> AsyncIterator[list[str]]:
        """Send a version to the engines yourself, at the base URLs that this gives; as `TrainerClient.updating`."""
        update = self._client.updating(version, wait_s=wait_s)
        engines = await self._while_serving(update.__aenter__(), outlives=False)
        try:
            yield engines
        except BaseException as error:
            await update.__aexit__(type(error), error, error.__traceback__)
            raise
        await self._while_serving(update.__aexit__(None, None, None), outlives=False)

    @property
    def engines_waiting(self) -> int:
        """Engines that wait for the program to send them weights (`updating`)."""
        return self._service.updates.waiting

    async def checkpointed(self, step: int) -> None:
        """The program can go on from behind a step; see `trainer.keep_batches`. Returns once that is recorded."""
        await self._while_serving(self._client.checkpointed(step), outlives=True)

    async def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step for people, such as loss or logprob_mismatch; TrainerLinkError when they are refused."""
        await self._while_serving(self._client.report(step, metrics), outlives=False)

    async def _while_serving(self, doing: Coroutine[Any, Any, T], *, outlives: bool) -> T:
        """Await something of the run; its error instead, if that comes first. `outlives`: an ended run answers it too."""
        if self._serving.done() and (self._left or not outlives):
            doing.close()
            self._raise_error()
            raise OrchestratorError("the run was left" if self._left else f"the run is over: {self.ended}")
        asked = asyncio.create_task(doing)  # noqa: TID251  ended and awaited below
        try:
            await asyncio.wait([asked, self._serving], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                self._raise_error()
                if not outlives:
                    raise OrchestratorError(f"the run is over: {self.ended}")
                self._service.server.finish(self.ended)
            return await asked
        finally:
            asked.cancel()
            await asyncio.wait([asked])

    def _raise_error(self) -> None:
        """Raise what ended the run, if it was an error."""
        error = None if self._serving.cancelled() else self._serving.exception()
        if error is not None:
            raise error


class _Batches:
    """Iterates; holds nothing that would have to be closed."""

    def __init__(self, run: EmbeddedRun) -> None:
        self._run = run

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TrainingBatch:
        batch = await self._run.next_batch()
        if batch is None:
            raise StopAsyncIteration
        return batch


@asynccontextmanager
async def running(
    config: str | Path | Config | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    **settings: Any,
) -> AsyncIterator[EmbeddedRun]:
    """Run a configuration as long as the block lasts; the body takes the trainer's part.

    `config` is the path of a TOML file, a dict of the same shape, or a Config. Settings are overridden as on the command
    line (`overrides=["--batch.size", "64"]`), or as keywords with `__` between table and name (`batch__size=64`). With `fresh`
    an existing journal is moved aside. Whatever `orchestrator run` would end with is raised here as an OrchestratorError.
    """
    resolved = _as_trainer(
        resolve_config(config, overrides, {key.replace("__", "."): value for key, value in settings.items()})
    )
    blueprint.verify(resolved)  # nothing is written for a configuration that cannot be started
    link = InsideLink()
    with _own_log(resolved):
        async with start_service(resolved, fresh=fresh, link=link) as service:
            client = InsideClient(link, token=secrets.trainer_token(resolved))
            serving = asyncio.create_task(service.serve())  # noqa: TID251  ended and awaited below
            run = EmbeddedRun(service, client, serving)
            try:
                await run._while_serving(client.join(), outlives=False)
                yield run
                if not serving.done():
                    await run._while_serving(client.ack_in_hand(), outlives=True)
            except BaseException:
                run._left = True
                await _abandon(service, serving)
                raise
            run._left = True
            await client.leave()
            # Behind the last batch the last version is still loaded and evaluated; then the run ends by itself.
            if not serving.done() and not service.run.all_acknowledged:
                service.stop.reason = "the program left the run"
                service.stop.set()
            try:
                run.summary = await service.finish(await serving)
            finally:
                await _abandon(service, serving)


def _as_trainer(config: Config) -> Config:
    """The configuration with the body in the trainer's place."""
    if config.trainer.world_size != 1:
        raise ConfigError(
            f"trainer.world_size is {config.trainer.world_size}, but a program that runs the service is one rank; "
            "set it to 1, or start the service with `orchestrator run` and connect each rank with TrainerClient"
        )
    if config.local is None or not config.local.trainer:
        return config
    return config.model_copy(update={"local": config.local.model_copy(update={"trainer": False})})


async def _abandon(service: Service, serving: asyncio.Task[str]) -> None:
    """End what serves, at once: what is finished is in the journal, the rest is asked again by a later run."""
    if not serving.done():
        service.run.save(service.driver.clock())
        serving.cancel()
    await asyncio.wait([serving])
    if not serving.cancelled():
        serving.exception()  # seen: it was raised in the body already, or is about to be


@contextmanager
def _own_log(config: Config) -> Iterator[None]:
    """`logs/orchestrator.log` of the run directory; the program's own logging stays as it is."""
    with open_log(config.run_dir) as file, log_to(file, config.log.level):
        for path, warning in find_warnings(config.model_dump()):
            log.warning("config.warning", path=path, warning=warning)
        try:
            yield
        except Exception as error:
            note(file, "run.failed", error=f"{type(error).__name__}: {error}")
            raise
