"""Problems that only show when fields are seen together; each with the TOML path it is about.

These look at the merged data before validation, tolerate anything of the wrong type (validation reports
that), and so report together with it.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from envs.addresses import base_url_problem, is_loopback
from envs.importing import nearest
from envs.loader import LOADERS
from orchestrator.config.domains import raw_domain_of, raw_targets
from orchestrator.config.fitting import find_misfit_warnings, find_misfits
from orchestrator.config.sampling import find_bad_sampling
from orchestrator.config.sections import FROM_TRAINER, BreakerConfig, DispatchConfig
from orchestrator.config.shapes import Problem
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
        *_domains(data),
        *_domain_targets(data),
        *_endpoints(data),
        *_initial_weights(data),
        *_ranks(data),
        *_exposure(data),
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
    for position, url in enumerate(urls if isinstance(urls, list) else []):
        where = f"inference.base_urls[{position}]"
        if isinstance(url, str) and (problem := base_url_problem(url)):
            yield where, problem


def _initial_weights(data: Mapping[str, Any]) -> Iterator[Problem]:
    inference = _table(data, "inference")
    initial, path = inference.get("initial_weights"), "inference.initial_weights"
    if initial is None:
        return
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
            addresses = env.get("addresses")
            for address in addresses if isinstance(addresses, list) else []:
                if isinstance(address, str) and "://" not in address:
                    yield f"{table}.env[{position}].addresses", _no_scheme(address)
                    continue
                open_wire = isinstance(address, str) and not is_loopback(address)
                if open_wire and not env.get("server_key_file") and not env.get("insecure"):
                    yield (
                        f"{table}.env[{position}].addresses",
                        f'"{address}" is off this machine; set server_key_file, or insecure = true',
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
