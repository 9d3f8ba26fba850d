"""`orchestrator simulate CONFIG`: what a configuration will do, before anything is paid for.

The rules of the run are the real ones, time is virtual, and environments, engines and trainer behave as a file states, as a run
has recorded, or as is assumed and said. `--compare` and `--sweep` put several configurations side by side. Starts nothing.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError, OrchestratorError, StalledError

if TYPE_CHECKING:
    from orchestrator.simulate.answers import Answer
    from orchestrator.simulate.behaviour import Surroundings
    from orchestrator.simulate.sweep import Point, Refused

STEPS = 50
"""Batches, where neither a number of them nor a time is asked for."""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "simulate",
        help="what a configuration will do: speed, staleness, mix, waste, before anything is started",
        description="Simulate a run in virtual time, with the real rules; docs/simulate.md tells more.",
    )
    parser.add_argument(
        "config",
        type=Path,
        nargs="?",
        metavar="CONFIG",
        help="configuration file (TOML); may be left out with --compare",
    )
    around = parser.add_argument_group("how environments, engines and trainer behave")
    around.add_argument("--behaviour", type=Path, metavar="FILE", help="a file that states it (TOML)")
    around.add_argument(
        "--from", dest="run_dir", type=Path, metavar="RUN_DIR", help="as recorded in an earlier run"
    )
    for flag, meaning in (
        ("--latency", "mean seconds of a rollout, such as math=5; repeatable"),
        ("--loss", "share of the groups lost by a failure, such as math=0.1; repeatable"),
        ("--tasks", "number of tasks, where the config sets no ratios; repeatable"),
    ):
        around.add_argument(flag, action="append", default=[], metavar="ENV=VALUE", help=meaning)
    around.add_argument(
        "--spread",
        type=float,
        default=1.0,
        help="spread of the log-normal latencies of --latency; 0: all equal (default 1)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="virtual time to simulate, instead of steps")
    length.add_argument(
        "--steps", type=int, help=f"batches to simulate (default {STEPS}, or max_steps if that is less)"
    )
    parser.add_argument("--seed", type=int, help="another seed than the configuration's")
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs with seeds one after the other (default 3)"
    )
    parser.add_argument(
        "--compare", type=Path, nargs="+", default=[], metavar="CONFIG", help="configurations side by side"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V,V",
        help="settings to try, all combinations; repeatable",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the result as a page of its own")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--mix-only",
        action="store_true",
        help="try every mix strategy alone, without dispatch, staleness and trainer",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    _check(args)
    if args.mix_only:
        from orchestrator.cli import simulate_mix

        return simulate_mix.run(args)
    from envs.logs import configure_logging
    from orchestrator.cli.simulate_tables import print_result
    from orchestrator.service.health import calm_garbage_collector

    calm_garbage_collector()
    configure_logging("critical")  # what a run would log is not what was asked for
    result = simulate(args)
    if args.html is not None:
        _write_page(args.html, result)
    if args.json:
        print(json.dumps(as_json(result), indent=2))
    else:
        print_result(result)
    return 0


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration file: the surroundings that it is simulated in, and what to know about that."""

    name: str
    around: "Surroundings"
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class SimulateResult:
    """What is printed: every configuration's surroundings and answers, and the points that there is no answer of, with the reason."""

    settings: Sequence[Setting]
    recorded: "Answer | None"
    points: "Sequence[Point]"
    refused: "Sequence[Refused]"
    swept: bool
    steps: int | None

    @property
    def title(self) -> str:
        """The files."""
        return ", ".join(setting.name for setting in self.settings)

    @property
    def notes(self) -> list[str]:
        """What to know about the surroundings; what holds for a part of the configurations names them."""
        told: dict[str, list[str]] = {}
        for setting in self.settings:
            for note in setting.notes:
                told.setdefault(note, []).append(setting.name)
        everyone = len(self.settings)
        return [
            note if len(names) == everyone else f"{', '.join(names)}: {note}" for note, names in told.items()
        ]


def simulate(args: argparse.Namespace) -> SimulateResult:
    """Everything that was asked for; an error only where nothing of it can be simulated."""
    from orchestrator.cli.simulate_plan import known_envs, plan, surroundings
    from orchestrator.service.imagined import imagine
    from orchestrator.service.recordings import read_recording
    from orchestrator.simulate.answers import answer_of_recording
    from orchestrator.simulate.sweep import Point, Refused, mark_best

    planned = plan(args)
    known = known_envs(planned)
    recording = read_recording(args.run_dir) if args.run_dir is not None else None
    steps = args.steps or (STEPS if args.minutes is None else None)
    seconds = float("inf") if args.minutes is None else args.minutes * 60
    settings: dict[str, Setting] = {}
    points, refused, errors = [], [], list[OrchestratorError]()
    for one in planned:
        # What is wrong with a behaviour file or a flag is wrong for every point.
        around, notes = surroundings(one.config, args, recording, known) if one.config else (None, [])
        if around is not None:
            before = settings.setdefault(one.file, Setting(one.file, around, []))
            notes = list(dict.fromkeys([*before.notes, *notes]))
            settings[one.file] = Setting(one.file, before.around, notes)
        try:
            if one.config is None or around is None:
                raise ConfigError(one.refused)
            run = imagine(one.config, around)
            answers = run.rehearse(seeds=args.seeds, steps=steps or 1 << 62, seconds=seconds)
        except (ConfigError, StalledError) as error:
            refused.append(Refused(one.name or one.file, str(error), one.values))
            errors.append(type(error)(f"{one.name}: {error}") if one.name else error)
        else:
            points.append(Point(one.name or one.file, answers, one.values))
    if not points:
        raise _all_of(errors)
    recorded = None
    if recording is not None:
        recorded = answer_of_recording(recording.steps, sequences_per_rollout=recording.sequences_per_rollout)
    return SimulateResult(
        list(settings.values()), recorded, mark_best(points), refused, bool(args.sweep), steps
    )


def _all_of(errors: "Sequence[OrchestratorError]") -> OrchestratorError:
    """One error for several: each reason once, and the exit code of a run that stalls if one of them does."""
    worst = next((error for error in errors if isinstance(error, StalledError)), errors[0])
    return type(worst)("\n".join(dict.fromkeys(map(str, errors))))


def as_json(result: SimulateResult) -> dict[str, Any]:
    """For machines."""
    from dataclasses import asdict

    return {
        "configs": [
            {"name": setting.name, "notes": list(setting.notes), "surroundings": _as_json(setting.around)}
            for setting in result.settings
        ],
        "recorded": None if result.recorded is None else asdict(result.recorded),
        "points": [
            {"name": point.name, "values": dict(point.values), "best": point.best, **point.answers.as_json()}
            for point in result.points
        ],
        "refused": [asdict(one) for one in result.refused],
    }


def _as_json(around: "Surroundings") -> dict[str, Any]:
    return {
        "envs": {
            name: {
                key: {"value": getattr(value, "text", value), "origin": env.origins[key]}
                for key, value in env.values.items()
            }
            for name, env in around.envs.items()
        },
        "trainer.step_s": {"value": around.step_s.text, "origin": around.origins["trainer.step_s"]},
        "weights.update_s": {"value": around.update_s.text, "origin": around.origins["weights.update_s"]},
        "engines.tokens_per_s": [list(pair) for pair in around.tokens_per_s],
    }


def _check(args: argparse.Namespace) -> None:
    for flag, value in (("--seeds", args.seeds), ("--steps", args.steps), ("--minutes", args.minutes)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{flag} {value}: a number above 0 is needed")
    if not 0 <= args.spread < math.inf:
        raise ConfigError(f"--spread {args.spread}: a number from 0 on is needed")
    if args.config is None and (args.mix_only or not args.compare):
        raise ConfigError(
            "no configuration is named; write `orchestrator simulate CONFIG`, or several after --compare"
        )
    if args.mix_only:
        given = [flag for flag in ("behaviour", "compare", "sweep", "html", "json") if getattr(args, flag)]
        if given:
            raise ConfigError(f"--{given[0]} is not for --mix-only, which tries the strategies alone")


def _write_page(path: Path, result: SimulateResult) -> None:
    """The file, whole or not at all."""
    from orchestrator.simulate.plot import build_page

    html = build_page(result.title, result.points, result.recorded, result.notes, result.refused).encode()
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(html)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    print(f"{path}: {len(html) / 1e3:.0f} kB", file=sys.stderr)
