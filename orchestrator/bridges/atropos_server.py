"""The HTTP side of the Atropos bridge: a few endpoints, and the care to know whether an answer has arrived.

An answer counts as arrived when the trainer's machine has confirmed every byte and the connection was not reset. A trainer that gave up
before, by its own time limit, has closed the connection with bytes that it had not read, which resets it; it is given the
same batch when it asks again. Where the system does not tell (it does on Linux), a whole answer that was sent has arrived.
"""

import asyncio
import fcntl
import socket
import struct
import termios
import uuid
from pathlib import Path

import msgspec
import structlog
from aiohttp import web

from envs.backoff import backoff_s
from orchestrator.bridges.atropos import Desk, Refused, Registration, Served, encode
from orchestrator.bridges.intake import AHEAD, Intake
from orchestrator.errors import ConfigError
from orchestrator.trainer import AsyncTrainerClient, TrainingBatch

log = structlog.get_logger("bridge")

_CONFIRM_S = 30.0
"""How long the last bytes of an answer may be under way."""
_MAX_BODY_BYTES = 64 * 1024
_WHOLE = (1, 8)
"""States of a TCP connection, as Linux numbers them: established, and closed in good order by the other side."""


async def run_bridge(
    trainer: AsyncTrainerClient, *, host: str, port: int, note: Path, ahead: int = 0
) -> None:
    """Serve until the run is over and its last batch is done with; a trainer may take batches `ahead` of the one that it trains on."""
    async with trainer:

        async def on_batch(batch: TrainingBatch) -> None:
            desk.offer(await asyncio.to_thread(encode, batch))

        def on_done(step: int) -> None:
            intake.done(step)

        desk = Desk(note, trainer.run, rewinds=trainer.rewinds, ahead=ahead, on_done=on_done)
        intake = Intake(trainer, on_batch=on_batch, on_end=desk.end, ahead=ahead + AHEAD)
        runner = web.AppRunner(build_app(desk), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            try:
                await site.start()
            except OSError as error:
                raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
            host, port = runner.addresses[0][:2]
            log.info("bridge.listening", url=f"http://{host}:{port}", orchestrator=trainer.address)
            await intake.run()
        finally:
            await runner.cleanup()


def build_app(desk: Desk) -> web.Application:
    """The endpoints that trainers of Atropos use."""

    async def root(request: web.Request) -> web.Response:
        return web.json_response({"message": "AtroposLib API"})

    async def register(request: web.Request) -> web.Response:
        try:
            registration = msgspec.json.decode(await request.read(), type=Registration)
        except msgspec.MsgspecError as error:
            return web.json_response({"detail": f"not a registration: {error}"}, status=422)
        if problem := desk.register(registration):
            log.error("bridge.trainer_refused", reason=problem)
            return web.json_response({"detail": problem}, status=409, reason=problem)
        log.info("bridge.trainer_registered", batch_size=registration.batch_size)
        return web.json_response({"uuid": uuid.uuid4().int})

    async def info(request: web.Request) -> web.Response:
        found = desk.registration
        sizes = (-1, -1) if found is None else (found.batch_size, found.max_token_len)
        return web.json_response(dict(zip(("batch_size", "max_token_len"), sizes, strict=True)))

    async def wandb_info(request: web.Request) -> web.Response:
        found = desk.registration
        names = (None, None) if found is None else (found.wandb_group, found.wandb_project)
        return web.json_response(dict(zip(("group", "project"), names, strict=True)))

    async def status(request: web.Request) -> web.Response:
        return web.json_response({"current_step": desk.step, "queue_size": desk.groups})

    async def batch(request: web.Request) -> web.StreamResponse:
        served = desk.ask()
        if isinstance(served, Refused):
            return web.json_response({"detail": served.reason}, status=409, reason=served.reason)
        if isinstance(served, bytes):
            return web.Response(body=served, content_type="application/json")
        return await _hand_over(request, desk, served)

    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.add_routes(
        [
            web.get("/", root),
            web.post("/register", register),
            web.get("/info", info),
            web.get("/wandb_info", wandb_info),
            web.get("/status", status),
            web.get("/batch", batch),
        ]
    )
    return app


async def _hand_over(request: web.Request, desk: Desk, served: Served) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = len(served.body)
    assert request.transport is not None
    opened: socket.socket = request.transport.get_extra_info("socket")
    # The trainer may hang up as soon as it has everything, so its connection is held by a name of our own.
    with socket.fromfd(opened.fileno(), opened.family, opened.type) as connection:
        try:
            await response.prepare(request)
            await response.write(memoryview(served.body)[:-1])
            arrived = await _has_arrived(request, connection)
            if arrived:
                desk.finishing(served)
                await response.write(served.body[-1:])
                await response.write_eof()
                arrived = await _has_arrived(request, connection)
        except (ConnectionError, TimeoutError) as error:
            log.warning("bridge.not_taken", step=served.step, error=str(error) or type(error).__name__)
            raise
    if arrived:
        desk.delivered(served)
    else:
        log.warning(
            "bridge.not_taken", step=served.step, error="the trainer hung up before it had everything"
        )
    return response


async def _has_arrived(request: web.Request, connection: socket.socket) -> bool:
    """Whether the other side has confirmed every byte; there is no event for it, so it is asked for again and again."""
    attempt = 0
    async with asyncio.timeout(_CONFIRM_S):
        while True:
            transport = request.transport
            to_be_sent = 0 if transport is None else transport.get_write_buffer_size()
            try:
                state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                (unconfirmed,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
            except (AttributeError, OSError):
                return not to_be_sent
            if state not in _WHOLE:
                return False
            if not to_be_sent and not unconfirmed:
                return True
            attempt += 1
            await asyncio.sleep(backoff_s(attempt, first_s=0.001, max_s=0.1))
