"""`check --deep`: what can only be known by trying, all of it at once, and nothing stays behind.

Every environment is loaded by a server process as a run would start it, under its own interpreter, and servers that run
elsewhere are greeted. Sources are looked at, and whoever they name is tried. Every inference server is asked for its model and its log-probabilities. Ports are bound and given back. What it finds are
lines for the user: problems, which a run would meet too, and warnings.
"""

import asyncio
import contextlib
import errno
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from envs.errors import shown_url
from envs.report import EnvReport, read_report
from orchestrator.config import Config
from orchestrator.discovery import LookupFailed, Source, is_source, look_up
from orchestrator.discovery.lookup import look_aside
from orchestrator.discovery.source import ENGINES
from orchestrator.env_servers.env import Env
from orchestrator.errors import ConfigError, EnvError
from orchestrator.inference import EngineApi, EngineError, EngineRefusedError
from orchestrator.service import blueprint, env_blueprint, inference_blueprint

ANSWER_S = 5.0
"""How long a server that should be running may take to answer."""

SAMPLE_S = 30.0
"""How long it may take to say what it returns, which the first time takes vLLM seconds."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found, a line each."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


async def look_deep(config: Config) -> Findings:
    """Try everything that the configuration names."""
    found = Findings(problems=[*blueprint.find_faults(config), *_unusable_ports(config), *_run_dir(config)])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_try_envs(config, found))
        for url in config.inference.base_urls:
            if is_source(url):
                tasks.create_task(_ask_named_engines(config, url, found))
            else:
                tasks.create_task(_ask_engine(config, url, found))
    return found


async def _ask_named_engines(config: Config, entry: str, found: Findings) -> None:
    """Ask every inference server that a source names now."""
    (source,) = env_blueprint.sources_of(config, [entry], ENGINES)
    named = await _named(source)
    if isinstance(named, str):
        found.problems.append(f"inference.base_urls: {named}")
        return
    async with asyncio.TaskGroup() as tasks:
        for url in named:
            tasks.create_task(_ask_engine(config, url, found))


async def _named(source: Source) -> list[str] | str:
    """Who a source names now, or why there is nobody."""
    try:
        async with asyncio.timeout(ANSWER_S):
            named = await look_aside(look_up, source)
    except TimeoutError:
        return f"{source.text}: no answer in {ANSWER_S:g} s"
    if isinstance(named, LookupFailed):
        return f"{source.text}: {named}"
    return named or f"{source.text} names no server"


async def _try_envs(config: Config, found: Findings) -> None:
    """Start one server of each environment, side by side, and read what it says."""
    with tempfile.TemporaryDirectory(prefix="check-") as directory:
        async with asyncio.TaskGroup() as tasks:
            trials = {
                env.name: tasks.create_task(_try_env(env, Path(directory, str(number))))
                for number, env in enumerate(_buildable(config))
            }
    outcomes = {name: trial.result() for name, trial in trials.items()}
    for name, outcome in outcomes.items():
        found.problems.extend([outcome] if isinstance(outcome, str) else _unfit(name, outcome))
    reports = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, EnvReport)}
    found.warnings.extend(_same_tasks(config, reports))


def _buildable(config: Config) -> Iterator[Env]:
    """The environments without those whose faults are known already."""
    places = env_blueprint.build_places(config)
    for section in config.train.env:
        with contextlib.suppress(ConfigError):
            env_blueprint.verify_env(config, section, train=True)
            yield env_blueprint.build_train_env(config, section, places)
    for evaluated in config.eval.env:
        with contextlib.suppress(ConfigError):
            env_blueprint.verify_env(config, evaluated, train=False)
            yield env_blueprint.build_eval_env(config, evaluated, places)


async def _try_env(env: Env, folder: Path) -> EnvReport | str:
    """What its server reports, or why there is none; an environment that runs elsewhere reports nothing."""
    timeout_s = min(env.spec.ready_timeout_s, ANSWER_S) if env.spec.elsewhere else env.spec.ready_timeout_s
    report = folder / "report.json"
    addresses = list(env.spec.addresses)
    for source in env.spec.sources:
        named = await _named(source)
        if isinstance(named, str):
            return f'env "{env.name}": {named}'
        addresses += [address for address in named if address not in addresses]
    spec = replace(env.spec, workers=1, log_dir=folder, report=report, ready_timeout_s=timeout_s)
    trial = Env(replace(spec, addresses=tuple(addresses), sources=()))
    try:
        await trial.spawn()
        await trial.connect()
    except EnvError as error:
        # Its log goes with the folder; the lines of a traceback stay apart from the next problem.
        return re.sub(r"\nits log: .*", "", str(error)).replace("\n", "\n    ")
    finally:
        await trial.shutdown()
    return read_report(report) or EnvReport([], {})


def _unfit(name: str, report: EnvReport) -> Iterator[str]:
    for line in report.args:
        yield f'env "{name}": args: {line}'
    for split, survey in report.splits.items():
        for line in survey.problems:
            yield f'env "{name}": split "{split}": {line}'


def _same_tasks(config: Config, reports: Mapping[str, EnvReport]) -> Iterator[str]:
    """Evaluations whose first tasks are those of a training environment."""
    trained = {section.label: _digests(reports, section.label) for section in config.train.env}
    for section in config.eval.env:
        evaluated = _digests(reports, f"eval-{section.label}")
        for name, digests in trained.items():
            if evaluated and evaluated == digests:
                yield (
                    f'eval env "{section.label}" begins with the tasks of train env "{name}", so that it measures what '
                    f"was trained on; does its tasks(split) look at the split?"
                )


def _digests(reports: Mapping[str, EnvReport], name: str) -> list[int]:
    """Of the one split that was loaded."""
    surveys = reports[name].splits.values() if name in reports else ()
    return [digest for survey in surveys for digest in survey.digests]


async def _ask_engine(config: Config, base_url: str, found: Findings) -> None:
    """Ask an inference server for its models; where it has none, guess what its address should have been."""
    url, name = base_url.rstrip("/"), config.model.name
    key = os.environ.get(config.inference.api_key_env or "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    where = f"inference server {shown_url(base_url)}"
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        try:
            status, models = await _models(session, url)
            if models is not None:
                if name not in models:
                    served = ", ".join(models) or "none"
                    found.problems.append(
                        f'{where}: it does not serve model.name = "{name}"; it serves {served}'
                    )
                    return
                api = EngineApi(url, url.removesuffix("/v1"), session, check_timeout_s=ANSWER_S)
                await inference_blueprint.build_sampling_check(config, timeout_s=SAMPLE_S).check(api)
                return
            if status in (401, 403):
                found.problems.append(
                    f"{where}: it answers {status}; set inference.api_key_env to the variable with its key"
                )
                return
            root = "/".join(url.split("/")[:3])
            guesses = dict.fromkeys([url.removesuffix("/v1"), f"{url}/v1", f"{root}/v1"])
            hint = "; is it an OpenAI-compatible server?"
            for guess in guesses:
                if guess != url and (await _models(session, guess))[1] is not None:
                    hint = f"; {guess} does, did you mean that?"
            found.problems.append(f"{where}: /models answers {status} and names no model{hint}")
        except EngineRefusedError as error:
            found.problems.append(f"{where}: it {error.said}")
        except (aiohttp.ClientError, EngineError, TimeoutError, ValueError) as error:
            found.problems.append(f"{where}: it does not answer ({error or type(error).__name__}); is it up?")


async def _models(session: aiohttp.ClientSession, base_url: str) -> tuple[int, list[str] | None]:
    """The status of the answer, and the models that it names."""
    async with session.get(f"{base_url}/models") as response:
        body = await response.read()
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        if response.status == 200:
            answer: Any = msgspec.json.decode(body)
            return 200, [str(model["id"]) for model in answer["data"]]
    return response.status, None


def _unusable_ports(config: Config) -> Iterator[str]:
    """Ports that the run would listen on and that cannot be bound now."""
    wanted: list[tuple[str, str, int]] = []
    link = re.fullmatch(r"tcp://(.*):(\d+)", config.trainer.bind)
    if config.trainer.transport == "zmq" and link is not None:
        wanted.append(("trainer.bind", link[1].strip("[]").replace("*", ""), int(link[2])))
    if config.http.enabled:
        wanted.append(("http.port", config.http.host, config.http.port))
    for setting, host, port in wanted:
        try:
            _bind(host, port)
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "something listens there already; is this run running?" if taken else str(error)
            yield f"{setting}: cannot listen on {host}:{port}: {why}"


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as trial:
        # As servers do, so that connections of an earlier one that are not quite closed do not matter.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)


def _run_dir(config: Config) -> Sequence[str]:
    """Whether the run directory, or the first of its parents that is there, can be written."""
    there = next(path for path in [config.run_dir, *config.run_dir.absolute().parents] if path.exists())
    if not there.is_dir():
        return [f"run_dir: {there} is not a directory"]
    return [] if os.access(there, os.W_OK | os.X_OK) else [f"run_dir: {there} cannot be written"]
