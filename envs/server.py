"""An env server: one process that hosts one environment behind a ROUTER socket.

`python -m envs.server` reads its `ServerSpec` as one line of JSON from standard input (so that no secret is
ever in an argument list) and serves until SIGTERM, or until standard input ends, which is how it notices
that its parent has gone. Those who spawn it put a keeper in between, see `envs.keeper`; with `--template` it is a
process that many servers are forked from, see `envs.template`.
The environment is made on the main thread before the event loop starts. Being bound is being alive, `setup`
having returned is being ready. The server never ends on its own: what a rollout does is the rollout's
outcome. Exit codes: 0 asked to stop, 3 could not start, 1 a bug or a rollout that could not be stopped.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import zmq

from envs import wire
from envs.addresses import is_loopback
from envs.answering import Responder
from envs.curve import Gatekeeper, secure_server
from envs.drained import DrainedSocket
from envs.environment import Environment
from envs.errors import EnvironmentLoadError, EnvironmentRaisedError
from envs.inference_client import InferenceClient
from envs.lifeline import Lifeline
from envs.loader import load_environment
from envs.logs import configure_logging
from envs.report import write_report
from envs.seeding import seeded
from envs.server_spec import EXIT_STARTUP, ServerSpec
from envs.sessions import ActiveRequest, Sessions
from envs.template import become_server
from envs.vanished import notice_vanished
from envs.watchdog import LoopWatchdog

log = structlog.get_logger()

EXIT_STUCK = 1
_BEAT_S = 1.0
_STOP_REQUESTS_S = 5.0
_CLOSE_ENVIRONMENT_S = 5.0
_LEAVE_THREADS_S = 3.0
_LINGER_MS = 1000


class ServerStartError(Exception):
    """The server cannot start; the message is one line for the user."""


class EnvServer:
    """Serves one environment from `serve` until `stop`."""

    def __init__(
        self, spec: ServerSpec, environment: Environment, *, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self._spec = spec
        self._environment = environment
        self._context = context
        self._stopping = asyncio.Event()
        self._socket: DrainedSocket | None = None
        self._requests: asyncio.TaskGroup | None = None
        self._active: set[asyncio.Task[list[bytes]]] = set()
        self._responder: Responder | None = None
        self._sessions = Sessions(
            env=spec.id,
            capacity=spec.capacity,
            send=self._send,
            start=self._start,
            key_variables=spec.key_variables,
        )
        self._watchdog = LoopWatchdog(running=self._sessions.running)
        self._lag_s = 0.0
        self.address = ""
        self.load_failed = False

    def stop(self) -> None:
        """Ask the server to end; returns at once."""
        self._stopping.set()

    async def serve(self) -> None:
        """Bind, load, serve, and on `stop` end everything in reverse, each step within its bound."""
        gatekeeper = self._bind()
        try:
            async with InferenceClient(limit=self._spec.capacity) as client, asyncio.TaskGroup() as tasks:
                self._requests = tasks
                self._watchdog.start()
                loading = tasks.create_task(self._load(client), name="load")
                beating = tasks.create_task(self._beat(), name="beat")
                await self._stopping.wait()
                loading.cancel()
                beating.cancel()
                stuck = await self._stop_requests()
                await self._close_environment()
                if stuck:
                    # A task that ignores cancellation would keep this process for ever.
                    log.error("server.stuck", exit_code=EXIT_STUCK)
                    sys.stderr.flush()
                    os._exit(EXIT_STUCK)
        finally:
            self._watchdog.stop()
            if self._socket is not None:
                self._socket.close(linger_ms=_LINGER_MS)
            if gatekeeper is not None:
                gatekeeper.stop()

    def _bind(self) -> Gatekeeper | None:
        spec, keys = self._spec, self._spec.keys
        if not is_loopback(spec.bind) and keys is None and not spec.insecure:
            raise ServerStartError(
                f"{spec.bind} can be reached by other machines and there are no CURVE keys; "
                "make some with `orchestrator env keygen`, or allow it with insecure = true"
            )
        gatekeeper = Gatekeeper(self._context, keys.clients) if keys is not None else None
        socket = self._context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_REQUEST_BYTES)
            # Sending to a connection that is gone is an error instead of a silent drop.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDHWM, 2 * spec.capacity + 1000)
            # libzmq ends the process when a peer's ping meets a connection that was reset while its input was stopped.
            # So its input never stops: what clients send is small, and is read as it comes.
            socket.setsockopt(zmq.RCVHWM, 0)
            notice_vanished(socket)
            socket.setsockopt(zmq.IPV6, int("[" in spec.bind))
            if keys is not None:
                secure_server(socket, keys)
            socket.bind(spec.bind)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            if gatekeeper is not None:
                gatekeeper.stop()
            raise ServerStartError(f"cannot bind {spec.bind}: {error}") from None
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket = DrainedSocket(socket, self._on_frames, loop=asyncio.get_running_loop())
        log.info("server.listening", address=self.address)
        return gatekeeper

    async def _load(self, client: InferenceClient) -> None:
        spec = self._spec
        responder = Responder(self._environment, client=client, env=spec.env or spec.id, seed=spec.seed)
        try:
            counts = await responder.prepare(spec.splits)
            if spec.report:
                write_report(spec, responder)
        except EnvironmentLoadError as error:
            _log_load_failure(error)
            self.load_failed = True
            self.stop()
            return
        self._responder = responder
        self._sessions.loaded(
            count_tasks=responder.tasks_in,
            sample_tasks=responder.samples_of,
            group_scored=responder.group_scored,
            capacity=responder.capacity,
        )
        log.info("server.ready", tasks=counts, group_scored=responder.group_scored)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_BEAT_S)
            self._lag_s = self._watchdog.take_lag_s()
            self._sessions.beat(now=loop.time(), stats=self._stats())

    async def _stop_requests(self) -> bool:
        """Cancel what runs and wait until it is answered; whether something clings on nevertheless."""
        self._sessions.stop()
        if not self._active:
            return False
        _, stuck = await asyncio.wait(self._active, timeout=_STOP_REQUESTS_S)
        for task in stuck:
            log.warning("request.stuck", request=task.get_name(), why="the environment ignores cancellation")
        return bool(stuck)

    async def _close_environment(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_ENVIRONMENT_S):
                await self._environment.close()
        # The environment's own code: whatever it raises must not keep the server from ending.
        except BaseException:
            log.exception("environment.close_failed")

    def _stats(self) -> wire.ServerStats:
        return self._sessions.stats(loop_lag_s=self._lag_s, rss_bytes=_resident_bytes())

    def _on_frames(self, frames: list[bytes]) -> None:
        now = asyncio.get_running_loop().time()
        self._sessions.on_message(frames[0], frames[1:], now=now, stats=self._stats)

    def _send(self, route: bytes, frames: list[bytes]) -> bool:
        """Whether the message could be queued; not when the connection is gone or its queue full."""
        if self._socket is None or self._socket.closed:
            return False
        try:
            self._socket.send([route, *frames])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def _start(self, active: ActiveRequest) -> None:
        assert self._requests is not None
        assert self._responder is not None
        session = active.session
        answering = self._responder.answer(active.request, session.settings, protocol=session.hello.protocol)
        task = self._requests.create_task(answering, name=active.name)
        active.cancel = task.cancel
        self._active.add(task)
        # Not the coroutine's own last step: one that is cancelled before it began has none.
        task.add_done_callback(lambda done: self._on_ended(active, done))

    def _on_ended(self, active: ActiveRequest, task: asyncio.Task[list[bytes]]) -> None:
        self._active.discard(task)
        frames: list[bytes] = []
        if task.cancelled():
            active.reason = active.reason or "server_stopping"
        elif task.exception() is None:
            frames = task.result()
        # A result has array frames behind its header; a failure has not.
        self._sessions.on_done(active, frames, failed=len(frames) == 1)


def _log_load_failure(error: EnvironmentLoadError) -> None:
    """Why an environment cannot be loaded, and the author's own traceback where its code raised."""
    trace = error.traceback if isinstance(error, EnvironmentRaisedError) else None
    log.error("server.start_failed", why=str(error), traceback=trace)


def _resident_bytes() -> int:
    """Memory of this process; its peak where the present one cannot be read."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def run_server(spec: ServerSpec, *, on_start: Callable[[EnvServer], None] = lambda server: None) -> int:
    """Load the environment, serve it until told to stop, and return the exit code. Needs the main thread."""
    try:
        with seeded(spec.seed, "load"):
            environment = load_environment(spec.id, spec.args)
    except EnvironmentLoadError as error:
        _log_load_failure(error)
        return EXIT_STARTUP
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(spec, environment, on_start))


async def _serve(spec: ServerSpec, environment: Environment, on_start: Callable[[EnvServer], None]) -> int:
    loop = asyncio.get_running_loop()
    with zmq.Context() as context:
        server = EnvServer(spec, environment, context=context)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        on_start(server)
        try:
            await server.serve()
        except ServerStartError as error:
            log.error("server.start_failed", why=str(error))
            return EXIT_STARTUP
    log.info("server.stopped")
    code = EXIT_STARTUP if server.load_failed else 0
    _leave_threads_behind(code)
    return code


def _leave_threads_behind(code: int) -> None:
    """End the process in a while whatever runs: nothing stops a thread, and the loop and the interpreter wait for all in pools."""
    threads = threading.enumerate()

    def leave() -> None:
        time.sleep(_LEAVE_THREADS_S)
        left = [thread.name for thread in threads if thread.is_alive() and not thread.daemon]
        log.warning(
            "server.threads_left", threads=left, why="the environment's calls on threads have not returned"
        )
        sys.stderr.flush()
        os._exit(code)

    threading.Thread(target=leave, name="leave", daemon=True).start()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where the interpreter has it."""
    with contextlib.suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None


def _no_breakpoint(environment: str) -> Callable[..., None]:
    """What breakpoint() does in a server: its standard input is empty, and a debugger would end the rollout unasked."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError(
            "breakpoint() needs a terminal, which an env server does not have; "
            f'debug with "orchestrator env try {environment} -n 1", or name another debugger in PYTHONBREAKPOINT'
        )

    return refuse


def main() -> int:
    """Entry point of a spawned server."""
    if sys.argv[1:] == ["--template"]:
        become_server()
        sys.argv[1:] = []
    lifeline = Lifeline()
    line = lifeline.read_line()
    if not line:
        return EXIT_STARTUP
    spec = msgspec.json.decode(line, type=ServerSpec)
    configure_logging(spec.log_level, spec.log_format, server=spec.name)
    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = _no_breakpoint(spec.id)

    def watch_parent(server: EnvServer) -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already: the server has ended
                loop.call_soon_threadsafe(server.stop)

        lifeline.watch(stop, kill_after_s=_STOP_REQUESTS_S + _CLOSE_ENVIRONMENT_S + 2.0)

    return run_server(spec, on_start=watch_parent)


if __name__ == "__main__":
    sys.exit(main())
