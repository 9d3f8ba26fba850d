"""The command line: parses, runs a command, and turns an error into one line and an exit code.

A user's mistake prints one line on standard error, never a traceback; a traceback means a bug of ours.
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence

from orchestrator import __version__
from orchestrator.errors import OrchestratorError
from orchestrator.views.terminal import plain_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What the encoding of a terminal lacks is a mark there, not an error.
            stream.reconfigure(errors="replace")
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not getattr(arguments, "takes_overrides", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.overrides = rest
    try:
        code = int(arguments.run(arguments))
        print(end="", flush=True)
    except BrokenPipeError:
        if sys.__stdout__ is None or sys.stdout is not sys.__stdout__:
            raise  # of something else: commands that run for days outlive who reads what they say
        # `head` has read enough. What is still in the buffer must not be tried again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        code = 128 + signal.SIGPIPE
    except OrchestratorError as error:
        # The message may quote an environment, a server or its log.
        print(f"orchestrator: {plain_lines(str(error))}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    if getattr(arguments, "ends_at_once", False):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    # Imported here, so that importing the package for its entry point stays cheap.
    from orchestrator.cli import bridge, ctl, env, init, rollouts, run, simulate, status, tasks, view

    parser = argparse.ArgumentParser(
        prog="orchestrator",
        description="Feeds a reinforcement-learning trainer of language models with batches of rollouts.",
        epilog="`orchestrator COMMAND --help` tells about each; `orchestrator init DIR` writes a project to begin with.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (init, run, env, simulate, status, ctl, rollouts, tasks, view, bridge):
        module.register(commands)
    return parser
