"""A process that says which tasks an environment has: `python -m envs.task_digests`, for those who compare two of them.

Reads a `ServerSpec` as one line of JSON from standard input, loads the environment as a server would, and writes one line
of JSON to standard output: for each of the first `capacity` tasks of the first split its digest, and how it begins.
"""

import asyncio
import contextlib
import os
import sys

import msgspec

from envs.answering import Responder
from envs.environment import Environment
from envs.errors import EnvironmentLoadError
from envs.inference_client import InferenceClient
from envs.loader import load_environment
from envs.seeding import seeded
from envs.server_spec import EXIT_STARTUP, ServerSpec

_TEXT_CHARS = 300


async def _listed(spec: ServerSpec, environment: Environment) -> list[tuple[int, str]]:
    responder = Responder(environment, client=InferenceClient(limit=1), env=spec.id, seed=spec.seed)
    split = spec.splits[0]
    await responder.prepare([split])
    try:
        digests = responder.samples_of(split, spec.capacity)
        return [
            (digest, repr(_plain(responder.task(split, index)))[:_TEXT_CHARS])
            for index, digest in digests.items()
        ]
    finally:
        with contextlib.suppress(Exception):
            await environment.close()


def _plain(task: object) -> object:
    return dict(task) if hasattr(task, "keys") else task  # type: ignore[call-overload]  # a mapping


def main() -> int:
    """Entry point."""
    # Environments may print; the answer has a channel of its own.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = msgspec.json.decode(sys.stdin.readline(), type=ServerSpec)
    try:
        with seeded(spec.seed, "load"):
            environment = load_environment(spec.id, spec.args)
        listed = asyncio.run(_listed(spec, environment))
    except EnvironmentLoadError as error:
        print(" ".join(str(error).split()), file=sys.stderr)  # noqa: T201  there is no log here
        return EXIT_STARTUP
    # The environment's own code, which may raise anything; whoever asked shows it.
    except Exception as error:  # noqa: BLE001  see above
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)  # noqa: T201  there is no log here
        return EXIT_STARTUP
    print(msgspec.json.encode(listed).decode(), file=channel, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
