"""`orchestrator env …`: what an environment's author and host need before there is any configuration.

`list` shows what can be loaded, `try` runs a few rollouts and prints them, `serve` hosts an environment for
orchestrators elsewhere, `keygen` makes the keys for that. Parsing lives here; the work of `try` and `serve`
in modules of their own, imported only when asked for. A user's mistake prints one line and exits with 2.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_USAGE = 2


class UsageError(ValueError):
    """A mistake on the command line; the message is one line."""


def register(commands: "Commands") -> None:
    """Add `env` and its subcommands; each sets `run`, a function of the arguments that returns the exit code."""
    env = commands.add_parser(
        "env",
        help="list, try and host environments",
        description="What the author or the host of an environment needs. None of these takes a configuration file.",
    )
    verbs = env.add_subparsers(dest="verb", required=True, metavar="list | try | serve | keygen")
    _add_list(verbs)
    _add_try(verbs)
    _add_serve(verbs)
    _add_keygen(verbs)


def _add(verbs: "Commands", name: str, line: str, text: str) -> argparse.ArgumentParser:
    return verbs.add_parser(name, help=line, description=text)


def parse_pairs(texts: Iterable[str], option: str) -> dict[str, Any]:
    """Values given as `key=value` or as one JSON object; a value that is JSON is taken as that, else as text."""
    import msgspec

    values: dict[str, Any] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            try:
                values |= msgspec.json.decode(text, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise UsageError(f"{option}: {text!r} is not a JSON object: {error}") from None
            continue
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{option}: {text!r} is neither key=value nor a JSON object")
        try:
            values[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            values[key] = value
    return values


def _add_list(verbs: "Commands") -> None:
    parser = _add(
        verbs,
        "list",
        "show the environments that can be loaded",
        "Show the environments that this interpreter can load, and how to install the rest.",
    )
    parser.set_defaults(run=_user_errors(_list))


def _add_try(verbs: "Commands") -> None:
    parser = _add(
        verbs,
        "try",
        "run a few rollouts of an environment and print them",
        "Run a few rollouts of one task as an env server would, and print what was said and earned. "
        "Modules are found from the working directory. Exit code 1: a rollout failed, 3: the environment did not load.",
    )
    parser.add_argument("id", help="<loader>::<environment>[@split], module:Class, or a built-in name")
    parser.add_argument("--base-url", help="inference server, with its /v1 (default: the small local policy)")
    parser.add_argument("--model", help="model name at the server (default: the first that it serves)")
    parser.add_argument(
        "-n", "--rollouts", type=_positive, default=4, help="rollouts of the task (default: 4)"
    )
    parser.add_argument("--split", help='split of the tasks (default: that of the id, else "train")')
    parser.add_argument("--index", type=_natural, default=0, help="which task of the split (default: 0)")
    parser.add_argument(
        "--args",
        action="append",
        default=[],
        metavar="K=V|JSON",
        help="arguments of the environment's constructor; repeatable",
    )
    parser.add_argument(
        "--sampling", action="append", default=[], metavar="K=V|JSON", help="sampling parameters; repeatable"
    )
    parser.add_argument("--max-tokens", type=_positive, help="most tokens of one reply")
    parser.add_argument("--temperature", type=float, help="sampling temperature")
    parser.add_argument("--system-prompt", help="put in front of every conversation")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the API key")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds that a rollout may take; 0: any (default: 300)"
    )
    parser.add_argument(
        "--eval", action="store_true", help="ask for no token ids, so that any chat endpoint will do"
    )
    parser.add_argument(
        "--check",
        nargs="?",
        type=_positive,
        const=16,
        metavar="TASKS",
        help="first compare the tasks (16 of them, or as many as given) in two processes; they must be the same",
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error", "critical"],
        help="of what the environment logs (default: info)",
    )
    parser.set_defaults(run=_user_errors(_try))


def _add_serve(verbs: "Commands") -> None:
    parser = _add(
        verbs,
        "serve",
        "host an environment for orchestrators elsewhere",
        "Host an environment until a signal ends it, and print the `addresses` line for the configuration of an "
        "orchestrator. A worker that dies is started again.",
    )
    parser.add_argument("id", help="<loader>::<environment>, module:Class, or a built-in name")
    parser.add_argument(
        "--bind",
        default="tcp://127.0.0.1:7000",
        help="address of the first worker (default: tcp://127.0.0.1:7000)",
    )
    parser.add_argument(
        "--workers", type=_positive, default=1, help="processes, on consecutive ports (default: 1)"
    )
    parser.add_argument(
        "--capacity", type=_positive, default=256, help="rollouts that one worker runs at once (default: 256)"
    )
    parser.add_argument(
        "--args",
        action="append",
        default=[],
        metavar="K=V|JSON",
        help="arguments of the environment's constructor; repeatable",
    )
    parser.add_argument("--insecure", action="store_true", help="allow other machines in without keys")
    parser.add_argument("--secret-key-file", metavar="FILE|env:NAME", help="CURVE secret key of this server")
    parser.add_argument(
        "--client-key-file",
        action="append",
        default=[],
        metavar="FILE|env:NAME",
        help="CURVE public key of a client that is let in; may be repeated",
    )
    parser.add_argument(
        "--api-key-env",
        action="append",
        default=[],
        metavar="NAME",
        help="variable with an API key that clients may have used; may be repeated",
    )
    parser.add_argument(
        "--seed",
        type=_natural,
        default=0,
        help="for what is random while tasks are made; the same on all servers",
    )
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error")
    parser.set_defaults(run=_user_errors(_serve))


def _add_keygen(verbs: "Commands") -> None:
    parser = _add(
        verbs,
        "keygen",
        "make the CURVE keys of a server and of its clients",
        "Make two pairs of CURVE keys, one for `env serve` and one for the orchestrator that connects to it.",
    )
    parser.add_argument("directory", type=Path, help="where the four files go; made if it does not exist")
    parser.set_defaults(run=_user_errors(_keygen))


def _list(arguments: argparse.Namespace) -> int:
    from envs.errors import EnvironmentLoadError
    from envs.loader import FAMILIES, LOADERS, find_loader

    width = max(map(len, FAMILIES))
    for form, told in FAMILIES.items():
        print(f"{form:<{width}}  {told}")
    print()
    for loader_name in LOADERS:
        try:
            loader = find_loader(loader_name)
            # A name in angle brackets stands for any: the list of families has it.
            names = [name for name in loader.names() if not name.startswith("<")]
        except EnvironmentLoadError as error:
            print(f"{loader_name}::…  cannot be used yet: {error}")
            continue
        about = getattr(loader, "about", None)
        width = max(map(len, names), default=0)
        for name in names:
            print(f"{loader_name}::{name:<{width}}  {about(name) if about else ''}".rstrip())
    return 0


def _try(arguments: argparse.Namespace) -> int:
    from orchestrator.cli.env_try import TrySpec, try_environment

    sampling = parse_pairs(arguments.sampling, "--sampling")
    for name in ("max_tokens", "temperature"):
        if getattr(arguments, name) is not None:
            sampling[name] = getattr(arguments, name)
    return try_environment(
        TrySpec(
            id=arguments.id,
            base_url=arguments.base_url,
            model=arguments.model,
            rollouts=arguments.rollouts,
            split=arguments.split,
            index=arguments.index,
            args=parse_pairs(arguments.args, "--args"),
            sampling=sampling,
            system_prompt=arguments.system_prompt,
            api_key_env=arguments.api_key_env,
            timeout_s=arguments.timeout,
            train=not arguments.eval,
            check=arguments.check or 0,
            log_level=arguments.log_level,
        )
    )


def _serve(arguments: argparse.Namespace) -> int:
    from orchestrator.cli.env_serve import build_specs, serve_workers

    specs = build_specs(
        arguments.id,
        bind=arguments.bind,
        workers=arguments.workers,
        capacity=arguments.capacity,
        args=parse_pairs(arguments.args, "--args"),
        insecure=arguments.insecure,
        secret_key=arguments.secret_key_file,
        client_keys=arguments.client_key_file,
        key_variables=arguments.api_key_env,
        seed=arguments.seed,
        log_level=arguments.log_level,
    )
    return serve_workers(specs)


def _keygen(arguments: argparse.Namespace) -> int:
    from envs.curve import write_pair

    directory: Path = arguments.directory
    for name in ("server", "client"):
        write_pair(directory, name)
    shown = directory.resolve()
    print(f"made {shown}/{{server,client}}.{{public,secret}}; the .secret files must stay private")
    print(
        f"serve with:    orchestrator env serve ID --bind tcp://0.0.0.0:7000"
        f" --secret-key-file {shown}/server.secret --client-key-file {shown}/client.public"
    )
    print(f'configure:     server_key_file = "{shown}/server.public"')
    print(f'               secret_key_file = "{shown}/client.secret"')
    return 0


def _user_errors(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A user's mistake is one line on standard error; anything else is our bug and shows its traceback."""

    def run(arguments: argparse.Namespace) -> int:
        from envs.curve import KeyFileError
        from envs.errors import EnvironmentLoadError

        try:
            return command(arguments)
        except (UsageError, EnvironmentLoadError, KeyFileError) as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USAGE

    return run


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return number
