"""Run the benchmarks and print one table of their figures; compare two revisions; write the README's table.

`python -m benchmarks [NAME ...]` measures, `--compare REV` measures a revision beside the working tree, and
`--readme FILE` measures nothing: it writes the README's table from a file that `--json` wrote.
The exit code is 1 if a benchmark failed, and 2 for a mistake on the command line; a missed goal changes nothing.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.compare import (
    ROUNDS,
    BadRevisionError,
    checked_out,
    compare,
    encode_comparison,
    print_comparison,
)
from benchmarks.frame import Effort
from benchmarks.readme import MissingRowError, write_readme
from benchmarks.report import Outcome, commit_of, decode, encode, make_report, this_machine, today
from benchmarks.runner import ROOT, benchmark_names, run_benchmark
from benchmarks.table import print_report

PIPE_WIDTH = 120
INTERRUPTED = 130


def main(argv: list[str] | None = None, *, tree: Path = ROOT) -> int:
    """The command, for the benchmarks of a tree."""
    arguments = _parser().parse_args(argv)
    if arguments.readme:
        return _write_readme(Path(arguments.readme), tree)
    if arguments.compare is not None:
        return _compare(arguments, tree)
    return _measure(arguments, tree)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these benchmarks")
    efforts = [effort.name.lower() for effort in Effort]
    parser.add_argument(
        "--effort", choices=efforts, help="how much is measured: full unless compared, then quick"
    )
    parser.add_argument("--quick", dest="effort", action="store_const", const="quick", help="--effort quick")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON too; - for standard output")
    parser.add_argument("--compare", metavar="REV", help="measure this revision beside the working tree")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"of each tree when comparing; {ROUNDS} if not given"
    )
    parser.add_argument("--readme", metavar="FILE", help="write the README's table from this JSON file")
    return parser


def _measure(arguments: argparse.Namespace, tree: Path) -> int:
    if mistake := _unknown(arguments.names, benchmark_names(tree)):
        return _mistake(mistake)
    if mistake := _no_place(arguments.json):
        return _mistake(mistake)
    effort = Effort[(arguments.effort or "full").upper()]
    machine, date, commit = this_machine(), today(), commit_of(tree)
    outcomes: dict[str, Outcome] = {}
    interrupted = False
    try:
        for name in arguments.names or benchmark_names(tree):
            began = time.monotonic()
            outcomes[name] = outcome = run_benchmark(name, effort, tree=tree)
            what = outcome.failed or outcome.left_out or f"{len(outcome.figures)} figures"
            _say(f"{name}: {what}, {time.monotonic() - began:.0f} s")
    except KeyboardInterrupt:
        interrupted = True
        _say("interrupted; what was measured until now:")
    report = make_report(outcomes, effort=effort.name.lower(), machine=machine, commit=commit, date=date)
    print_report(report, _console(to_stderr=arguments.json == "-"))
    _write_json(arguments.json, encode(report))
    if interrupted:
        return INTERRUPTED
    return 1 if report.failed else 0


def _compare(arguments: argparse.Namespace, here: Path) -> int:
    if arguments.rounds < 2:
        return _mistake("--rounds: at least 2, since one round has no range")
    if mistake := _no_place(arguments.json):
        return _mistake(mistake)
    effort = Effort[(arguments.effort or "quick").upper()]
    try:
        with checked_out(arguments.compare, here) as base:
            if mistake := _unknown(arguments.names, [*benchmark_names(base), *benchmark_names(here)]):
                return _mistake(mistake)
            found, troubles = compare(
                base, here, arguments.names, effort=effort, rounds=arguments.rounds, say=_say
            )
            name = f"{arguments.compare} ({commit_of(base)})"
    except BadRevisionError as error:
        return _mistake(str(error))
    except KeyboardInterrupt:
        _say("interrupted; a comparison needs all its rounds")
        return INTERRUPTED
    print_comparison(found, troubles, name, _console(to_stderr=arguments.json == "-"))
    effort_name = effort.name.lower()
    _write_json(
        arguments.json,
        encode_comparison(found, troubles, base=name, here=commit_of(here), effort=effort_name),
    )
    return 1 if any(outcome.failed for outcome in troubles.values()) else 0


def _no_place(file: str | None) -> str:
    """Why nothing could be written there; looked at before anything is measured."""
    there = not file or Path(file).parent.is_dir()
    return "" if there else f"--json: there is no directory {Path(str(file)).parent}"


def _write_json(file: str | None, text: str) -> None:
    if file == "-":
        sys.stdout.write(text)
    elif file:
        Path(file).write_text(text, encoding="utf-8")


def _unknown(asked: list[str], there: list[str]) -> str:
    unknown = ", ".join(sorted(set(asked) - set(there)))
    return f'no benchmark is named "{unknown}"; there are: {", ".join(sorted(set(there)))}' if unknown else ""


def _write_readme(source: Path, tree: Path) -> int:
    try:
        write_readme(decode(source.read_bytes()), tree / "README.md")
    except OSError as error:
        return _mistake(f"{source} cannot be read: {error.strerror}")
    except msgspec.DecodeError as error:
        return _mistake(f"{source} is no report of the benchmarks: {error}")
    except MissingRowError as error:
        return _mistake(str(error))
    return 0


def _console(*, to_stderr: bool) -> Console:
    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(file=stream, width=width)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _mistake(message: str) -> int:
    _say(message)
    return 2


if __name__ == "__main__":
    sys.exit(main())
