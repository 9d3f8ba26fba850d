"""Problems that only show when fields are seen together; each with the TOML path it is about.

These look at the merged data before validation, tolerate anything of the wrong type (validation reports
that), and so report together with it.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from envs.addresses import base_url_problem, is_loopback, server_address_problem
from envs.importing import nearest
from envs.loader import LOADERS
from orchestrator.config.domains import raw_domain_of, raw_targets
from orchestrator.config.env_sections import RESOURCES
from orchestrator.config.fitting import find_misfit_warnings, find_misfits
from orchestrator.config.sampling import find_bad_sampling
from orchestrator.config.sections import FROM_TRAINER, BreakerConfig, DispatchConfig
from orchestrator.config.shapes import Problem
from orchestrator.discovery import is_source, source_problem
from orchestrator.discovery.source import ENGINES, SERVERS
from orchestrator.mix.breaker import RESTORE, TRIP

RESERVED_OPTIONS = frozenset({"strategy", "env_names", "weights", "rng", "group_sizes"})


def find_problems(data: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the relations between fields."""
    return [
        *_names(data),
        *_ratios(data),
        *find_misfits(data),
        *find_bad_sampling(data),
        *_mix(data),
        *_curricula(data),
        *_domains(data),
        *_domain_targets(data),
        *_endpoints(data),
        *_initial_weights(data),
        *_ranks(data),
        *_exposure(data),
        *_launchers(data),
        *_trackers(data),
    ]


def find_warnings(data: Mapping[str, Any]) -> list[Problem]:
    """What works, but perhaps not as meant."""
    minimums = [_fraction(env.get("min_batch_allocation")) for env in _envs(data, "train")]
    total = sum(minimums, Fraction(0))
    scaled = [("train.env", f"minimums sum to {float(total):.0%}; they are scaled down to 100 %")]
    return [*(scaled if total > 1 else []), *find_misfit_warnings(data), *_staleness_warning(data)]


def _envs(data: Mapping[str, Any], table: str) -> list[Mapping[str, Any]]:
    section = data.get(table)
    envs = section.get("env") if isinstance(section, Mapping) else None
    return [env for env in envs if isinstance(env, Mapping)] if isinstance(envs, list) else []


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


def _fraction(value: object) -> Fraction:
    return Fraction(str(value)) if isinstance(value, (int, float)) and 0 <= value <= 1 else Fraction(0)


def _names(data: Mapping[str, Any]) -> Iterator[Problem]:
    for table in ("train", "eval"):
        seen: dict[str, int] = {}
        for position, env in enumerate(_envs(data, table)):
            name = env.get("name") or env.get("id")
            if isinstance(name, list) and all(isinstance(part, str) for part in name):
                name = " + ".join(name)
            if not isinstance(name, str):
                continue
            if name in seen:
                yield (
                    f"{table}.env[{position}].name",
                    f'"{name}" is already the name of {table}.env[{seen[name]}]; give one of them another name',
                )
            seen.setdefault(name, position)


def _ratios(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Envs that are weighed against each other: all of them, or those of each domain where domains have targets."""
    targets = raw_targets(data)
    mixed: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for position, env in enumerate(_envs(data, "train")):
        mixed.setdefault(raw_domain_of(env, data) if targets else "", []).append((position, env))
    for domain, envs in mixed.items():
        of_domain = f' of domain "{domain}"' if targets else ""
        without = [position for position, env in envs if env.get("ratio") is None]
        if without and len(without) < len(envs):
            missing = ", ".join(f"train.env[{position}]" for position in without)
            yield "train.env", f"either every env{of_domain} sets a ratio or none does; missing in {missing}"
        ratios = [env.get("ratio") for _, env in envs]
        if not without and all(isinstance(ratio, (int, float)) and ratio == 0 for ratio in ratios):
            yield "train.env", f"every ratio{of_domain} is 0, so no env{of_domain} could ever be picked"


def _mix(data: Mapping[str, Any]) -> Iterator[Problem]:
    mix = _table(data, "mix")
    options = mix.get("options")
    for name in RESERVED_OPTIONS.intersection(options if isinstance(options, Mapping) else ()):
        yield f"mix.options.{name}", "is not an option: every strategy is given it by the run"
    breaker = _table(mix, "breaker")
    if isinstance(options, Mapping) and "breaker" in options and _changed(breaker):
        yield "mix.options.breaker", "is set in [mix.breaker] too; remove one of the two"
    trip, restore = breaker.get("trip", TRIP), breaker.get("restore", RESTORE)
    if isinstance(trip, (int, float)) and isinstance(restore, (int, float)) and trip > restore:
        yield "mix.breaker.trip", f"{trip} is above restore ({restore}), so that an env would go in and out"


def _curricula(data: Mapping[str, Any]) -> Iterator[Problem]:
    tables = [("curriculum", data.get("curriculum"))]
    tables += [
        (f"train.env[{position}].curriculum", env.get("curriculum"))
        for position, env in enumerate(_envs(data, "train"))
    ]
    for path, table in tables:
        ends = table.get("reward_range") if isinstance(table, Mapping) else None
        numbers = isinstance(ends, (list, tuple)) and all(isinstance(end, (int, float)) for end in ends)
        if ends is not None and numbers and len(ends) == 2 and not ends[0] < ends[1]:
            yield f"{path}.reward_range", f"{ends[0]} is not below {ends[1]}"
        options = table.get("options") if isinstance(table, Mapping) else None
        if isinstance(options, Mapping) and "tasks" in options:
            yield f"{path}.options.tasks", "is not an option: every strategy is given it by the run"


def _changed(breaker: Mapping[str, Any]) -> bool:
    """Whether the table says anything else than its defaults."""
    defaults = BreakerConfig().model_dump()
    return any(value != defaults.get(name) for name, value in breaker.items())


def _domains(data: Mapping[str, Any]) -> Iterator[Problem]:
    for name in _table(data, "domains"):
        if name in LOADERS:
            yield f"domains.{name}", "a loader has this name already; choose another"


def _domain_targets(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Targets by domain are for the domains of the training envs: for all of them, and for no other."""
    targets = raw_targets(data)
    if not targets:
        return
    envs = [(position, raw_domain_of(env, data)) for position, env in enumerate(_envs(data, "train"))]
    there = dict.fromkeys(domain for _, domain in envs if domain)
    for name in targets:
        if name not in there:
            yield f"mix.domains.{name}", f"no train env is of this domain; {nearest(name, there)}"
    for domain in there:
        if domain not in targets:
            names = ", ".join(f"train.env[{position}]" for position, own in envs if own == domain)
            yield (
                "mix.domains",
                f'there is no target for domain "{domain}" ({names}); give every domain one, or none',
            )


def _endpoints(data: Mapping[str, Any]) -> Iterator[Problem]:
    urls = _table(data, "inference").get("base_urls")
    if "local" not in data and not urls:
        yield (
            "inference.base_urls",
            "no inference server is named; set base_urls, or add a [local] table for the built-in one",
        )
    if "local" in data and urls:
        yield "inference.base_urls", "[local] starts its own inference server; remove one of the two"
    entries = _entries(urls)
    for position, url in enumerate(entries):
        where = f"inference.base_urls[{position}]"
        problem = source_problem(url, ENGINES) if is_source(url) else base_url_problem(url)
        if problem:
            yield where, problem
        elif is_source(url) and url in entries[:position]:
            yield where, f'"{url}" is named twice'


def _initial_weights(data: Mapping[str, Any]) -> Iterator[Problem]:
    inference = _table(data, "inference")
    initial, path = inference.get("initial_weights"), "inference.initial_weights"
    sent = "local" not in data and inference.get("weight_update") == "trainer"
    if sent and _table(data, "trainer").get("versions_dir") is not None:
        yield (
            "trainer.versions_dir",
            'with weight_update = "trainer" versions are sent by the trainer; remove this',
        )
    if initial is None:
        return
    if sent and initial != FROM_TRAINER:
        yield (
            path,
            'with weight_update = "trainer" nothing is loaded from a folder; set it to "trainer", or remove it',
        )
    if "local" not in data and inference.get("weight_update", "none") == "none":
        yield path, 'weight_update = "none" loads no weights; set weight_update, or remove this'
    if initial == FROM_TRAINER and "local" in data and _table(data, "local").get("trainer", True):
        yield path, "the reference trainer of [local] publishes no version 0; remove this"


def _ranks(data: Mapping[str, Any]) -> Iterator[Problem]:
    batch = _table(data, "batch")
    size, world_size = batch.get("size", 256), _table(data, "trainer").get("world_size", 1)
    if not isinstance(size, int) or not isinstance(world_size, int) or world_size < 1:
        return
    if world_size > 1 and "local" in data and _table(data, "local").get("trainer", True):
        yield (
            "trainer.world_size",
            "the reference trainer of [local] is a single rank; set it to 1, or local.trainer = false",
        )
    if batch.get("unit", "sequences") == "tokens" and world_size > 1:
        yield (
            "trainer.world_size",
            "a batch by tokens has any number of sequences, which several ranks cannot share equally",
        )
    if batch.get("unit", "sequences") == "sequences" and size % world_size:
        yield "trainer.world_size", f"a batch of {size} cannot be shared equally by {world_size} ranks"


def _trackers(data: Mapping[str, Any]) -> Iterator[Problem]:
    """A tracker twice would log twice into one place; options of one that is not used were meant for another."""
    track = _table(data, "track")
    used = track.get("use")
    names = [name for name in used if isinstance(name, str)] if isinstance(used, list) else []
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield "track.use", f'"{name}" is there more than once'
    options = track.get("options")
    for name in options if isinstance(options, Mapping) else ():
        if name in ("wandb", "tensorboard"):
            yield f"track.options.{name}", f"its settings belong into [track.{name}]"
        elif name not in names:
            yield f'track.options."{name}"', f"track.use does not name it; {nearest(str(name), names)}"


def _exposure(data: Mapping[str, Any]) -> Iterator[Problem]:
    http = _table(data, "http")
    host = http.get("host", "127.0.0.1")
    if isinstance(host, str) and not is_loopback(host) and not http.get("token_env"):
        yield (
            "http.host",
            f'"{host}" is reachable from other machines; name the variable with a token in http.token_env',
        )
    trainer = _table(data, "trainer")
    bind = trainer.get("bind", "tcp://127.0.0.1:5555")
    if isinstance(bind, str) and "://" not in bind:
        yield "trainer.bind", _no_scheme(bind)
        bind = None
    moves = trainer.get("transport", "zmq") == "zmq" and isinstance(bind, str) and bind.endswith(":0")
    if trainer.get("allow_rewind") and moves:
        yield (
            "trainer.bind",
            "a run that restarts to be set back must be found again (trainer.allow_rewind): name a port other than 0, or an ipc address",
        )
    guarded = trainer.get("secret_key_file") or trainer.get("insecure")
    if isinstance(bind, str) and not is_loopback(bind) and not guarded:
        yield (
            "trainer.bind",
            f'"{bind}" is reachable from other machines; set trainer.secret_key_file, or insecure = true',
        )
    for table in ("train", "eval"):
        for position, env in enumerate(_envs(data, table)):
            if env.get("server_key_file") and not env.get("secret_key_file"):
                yield (
                    f"{table}.env[{position}].server_key_file",
                    "needs secret_key_file too, the key of this side",
                )
            if isinstance(env.get("id"), list) and env.get("addresses"):
                yield (
                    f"{table}.env[{position}].id",
                    "a server that runs elsewhere serves a single id; make each of these an env of its own",
                )
            addresses = _entries(env.get("addresses"))
            for number, address in enumerate(addresses):
                problem = _address_problem(
                    address, open_wire=not env.get("server_key_file") and not env.get("insecure")
                )
                if not problem and is_source(address) and address in addresses[:number]:
                    problem = f'"{address}" is named twice'
                if problem:
                    yield f"{table}.env[{position}].addresses", problem


def _entries(value: object) -> list[str]:
    """The texts of a list, or the one that stands alone."""
    entries = value if isinstance(value, list) else [value]
    return [entry for entry in entries if isinstance(entry, str)]


def _address_problem(address: str, *, open_wire: bool) -> str:
    """What is wrong with an entry of an env's addresses; what a file names is looked at when it is read."""
    if is_source(address) and ((problem := source_problem(address, SERVERS)) or address.startswith("file:")):
        return problem
    if "://" not in address:
        return _no_scheme(address)
    if not is_source(address) and (problem := server_address_problem(address)):
        return problem
    if open_wire and not is_loopback(address):
        return f'"{address}" is off this machine; set server_key_file, or insecure = true'
    return ""


def _launchers(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Servers run elsewhere or are started, and only Ray is told what they take up."""
    for table in ("train", "eval"):
        for position, env in enumerate(_envs(data, table)):
            on_ray = env.get("launcher", "process") == "ray"
            if on_ray and env.get("addresses"):
                yield (
                    f"{table}.env[{position}].launcher",
                    "servers at addresses run already, so that Ray has none to start; remove one of the two",
                )
            if not on_ray and env.get("resources", RESOURCES) != RESOURCES:
                yield (
                    f"{table}.env[{position}].resources",
                    'only launcher = "ray" reserves them; set it, or remove this',
                )


def _no_scheme(address: str) -> str:
    """What to say of a ZMQ address that does not say how it is reached."""
    guess = f"ipc://{address}" if address.startswith(("/", ".")) else f"tcp://{address}"
    return f'"{address}" does not begin with tcp:// or ipc://; did you mean "{guess}"?'


def _staleness_warning(data: Mapping[str, Any]) -> list[Problem]:
    batch, staleness = _table(data, "batch"), _table(data, "staleness")
    size, allowed = batch.get("size", 256), staleness.get("max_versions", 2)
    inflight = _table(data, "dispatch").get("max_inflight", 256)
    numbers = all(isinstance(value, int) for value in (size, allowed, inflight))
    if (
        not numbers
        or staleness.get("mode", "pace") != "pace"
        or batch.get("unit", "sequences") != "sequences"
    ):
        return []
    room = (allowed + 1) * size
    # The default is meant for batches of the default size; whoever did not choose it need not hear of it.
    if inflight <= room or inflight == DispatchConfig().max_inflight:
        return []
    text = f"only {room} rollouts can be under way with staleness.max_versions = {allowed}, so {inflight} are never in flight"
    return [("dispatch.max_inflight", text)]
