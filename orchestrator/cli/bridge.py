"""`orchestrator bridge`: feeds a trainer that was written for another system, as a client of the trainer link."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def register(commands: "Commands") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bridge",
        help="feed a trainer that was written for another system",
        description="Feed a trainer that was written for another system. A bridge takes the place of the trainer "
        "(trainer.world_size = 1), may be killed at any time, and ends with the run.",
    )
    bridges = parser.add_subparsers(
        dest="bridge", required=True, metavar="BRIDGE", help="which system it was written for"
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--connect",
        default="tcp://127.0.0.1:5555",
        help="where the orchestrator serves batches (trainer.bind)",
    )
    shared.add_argument(
        "--token-env",
        help="name of the environment variable that holds the trainer's token (trainer.token_env)",
    )
    atropos = bridges.add_parser(
        "atropos",
        parents=[shared],
        help="serve trainers of Atropos over HTTP, as its API server does",
        description="Serve trainers of Atropos over HTTP, as its API server does: /register, /info, /status, /batch.",
    )
    atropos.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine only)")
    atropos.add_argument(
        "--port", type=int, default=8000, help="port to listen at (default: 8000, as Atropos)"
    )
    atropos.add_argument(
        "--note",
        type=Path,
        default=Path("atropos_bridge.json"),
        help="file in which the bridge remembers what it has handed over (default: atropos_bridge.json)",
    )
    atropos.add_argument(
        "--ahead",
        type=int,
        default=0,
        help="batches that the trainer fetches before it has trained on the one before them (default: 0; axolotl's plugin: 4)",
    )
    atropos.set_defaults(run=atropos_command)
    prime_rl = bridges.add_parser(
        "prime-rl",
        parents=[shared],
        help="give batches to prime-rl's trainer, and follow its broadcasts",
        description="Give batches to prime-rl's trainer, as files or over ZMQ, and publish the weights that it broadcasts.",
    )
    prime_rl.add_argument("--out", type=Path, required=True, help="output directory of prime-rl's trainer")
    prime_rl.add_argument("--ranks", type=int, default=1, help="its data-parallel ranks (default: 1)")
    prime_rl.add_argument(
        "--seq-len", type=int, required=True, help="tokens that a micro-batch may have (seq_len of its model)"
    )
    prime_rl.add_argument(
        "--transport",
        choices=("filesystem", "zmq"),
        default="filesystem",
        help="how the trainer takes batches (type of its rollout_transport; default: filesystem)",
    )
    prime_rl.add_argument("--host", help="with zmq: where to listen (default: this machine only)")
    prime_rl.add_argument(
        "--port", type=int, help="with zmq: port of its rollout_transport; the next one is used too"
    )
    prime_rl.add_argument(
        "--rewind",
        action="store_true",
        help="have the run set back when the trainer goes back further than batches are kept (trainer.allow_rewind)",
    )
    prime_rl.set_defaults(run=prime_rl_command)


def atropos_command(arguments: argparse.Namespace) -> int:
    """Serve until the run is over."""
    from orchestrator.bridges.atropos_server import run_bridge

    if not arguments.note.absolute().parent.is_dir():
        raise ConfigError(f"--note: there is no directory {arguments.note.absolute().parent}")
    if arguments.ahead < 0:
        raise ConfigError(f"--ahead must be at least 0, got {arguments.ahead}")
    where = {"host": arguments.host, "port": arguments.port, "note": arguments.note}
    _run(run_bridge(_client(arguments), **where, ahead=arguments.ahead))
    return 0


def prime_rl_command(arguments: argparse.Namespace) -> int:
    """Give and follow until the run is over."""
    from orchestrator.bridges.prime_rl import Exchange, run_bridge

    for name in ("ranks", "seq_len"):
        if getattr(arguments, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}"
            )
    listen = _listen(arguments)
    exchange = Exchange(arguments.out, ranks=arguments.ranks, max_tokens=arguments.seq_len)
    _run(run_bridge(_client(arguments), exchange, listen=listen, rewind=arguments.rewind))
    return 0


def _listen(arguments: argparse.Namespace) -> tuple[str, int] | None:
    """Where batches are published, if they are."""
    if arguments.transport != "zmq":
        if arguments.host is not None or arguments.port is not None:
            raise ConfigError("--host and --port are for --transport zmq")
        return None
    # There is no default: prime-rl's own port is the orchestrator's for trainers, too.
    if arguments.port is None:
        raise ConfigError("--transport zmq needs --port, the port of the trainer's rollout_transport")
    if not 0 < arguments.port < 65535:
        raise ConfigError(f"--port must be between 1 and 65534, got {arguments.port}")
    return arguments.host or "127.0.0.1", arguments.port


def _client(arguments: argparse.Namespace) -> Any:
    from orchestrator.trainer import AsyncTrainerClient

    token = None
    if arguments.token_env is not None:
        token = os.environ.get(arguments.token_env)
        if not token:
            raise ConfigError(f"--token-env names {arguments.token_env}, which is not set in the environment")
    return AsyncTrainerClient(arguments.connect, auto_ack=False, token=token)


def _run(bridge: Any) -> None:
    from envs.logs import configure_logging
    from orchestrator.views.terminal import outlive_readers

    outlive_readers()
    configure_logging(process="bridge")
    import asyncio

    asyncio.run(bridge)
