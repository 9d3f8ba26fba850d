"""From a run's records to how its environments, engines and trainer behave.

Attempts that were cut off, by a time-out, a cancellation or a server's death, did not show how long they would have taken: only
that it is longer. They count as such (the estimate of Kaplan and Meier): until they were cut they make the others' times likelier to
be long, and after that they say nothing. Success and failure compete: each takes its share of those that were still under
way at that time. Pure; who reads the files is `service.recordings`.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.facts.steps import ENDS, SLOWEST, StepRecord, seconds_of
from orchestrator.simulate.behaviour import TINY_S, Members, Surroundings
from orchestrator.simulate.distributions import Distribution, between, drawn
from orchestrator.simulate.engines import Speeds

GRID = 400
"""Places at which a distribution is looked at."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What a run left. `groups` are recorded groups by env, `sequences` the sequences of each rollout, `tasks` the numbers of tasks.

    `equal`: the share of groups with equal rewards, of envs whose `groups` do not show it.
    """

    steps: Sequence[StepRecord]
    groups: Mapping[str, Sequence[Members]] = field(default_factory=dict)
    sequences: Mapping[str, Sequence[float]] = field(default_factory=dict)
    tasks: Mapping[str, int | None] = field(default_factory=dict)
    equal: Mapping[str, float] = field(default_factory=dict)

    @property
    def sequences_per_rollout(self) -> float:
        """Over all envs, weighed as they were trained on."""
        of_env = Counter[str]()
        for record in self.steps:
            of_env.update({name: env.sequences for name, env in record.envs.items()})
        rollouts = sum(n / self._per_rollout(name) for name, n in of_env.items())
        return sum(of_env.values()) / rollouts if rollouts else 1.0

    def _per_rollout(self, env: str) -> float:
        told = self.sequences.get(env)
        return statistics.mean(told) if told else 1.0


@dataclass(frozen=True, slots=True)
class Ends:
    """How attempts of an env end if nobody cuts them off: `share` of each way, and the times of those that end so.

    `unseen` is the share of which nobody knows the time: every attempt that got so far was cut off, the last at `longest` seconds.
    """

    share: Mapping[str, float]
    times: Mapping[str, Mapping[int, float]]
    unseen: float
    longest: float


def estimate_ends(times: Mapping[str, Mapping[int, int]]) -> Ends:
    """From the counts of `EnvStep.times`, with those that were cut off as what they are."""
    times = {way: counts for way, counts in times.items() if way in ENDS}
    under_way = sum(sum(counts.values()) for counts in times.values())
    ways = [way for way in times if way != "cut"]
    cut = times.get("cut", {})
    mass: dict[str, dict[int, float]] = {way: {} for way in ways}
    survived = 1.0
    steps = sorted({step for counts in times.values() for step in counts})
    for step in steps:
        here = {way: times[way].get(step, 0) for way in ways}
        ended = sum(here.values())
        for way, n in here.items():
            if n:
                mass[way][step] = survived * n / under_way
        if ended:
            survived *= 1 - ended / under_way
        # Cut in the same step: they were under way when the others ended.
        under_way -= ended + cut.get(step, 0)
    share = {way: sum(parts.values()) for way, parts in mass.items()}
    return Ends(share, mass, max(0.0, 1 - sum(share.values())), seconds_of(steps[-1]) if steps else 0.0)


def lay_recording(recording: Recording, onto: Surroundings) -> list[str]:
    """Lay what was recorded on top of what is assumed; returns what people should know about it."""
    notes = []
    for name, env in onto.envs.items():
        times = _added_times(recording.steps, name)
        if not any(times.get(way) for way in ENDS if way != "cut"):
            notes.append(f'env "{name}": the run has no times of its rollouts; what is assumed holds')
            continue
        ends = estimate_ends(times)
        env.put(_env_values(ends), "recorded")
        env.beyond = ends.unseen / max(ends.unseen, 1 - env.values["failure"], 1e-9), ends.longest
        if ends.unseen > 0.001:
            notes.append(
                f'env "{name}": {ends.unseen:.1%} of its rollouts take longer than {ends.longest:.3g} s, after which all were cut'
                " off: taken to end within twice that time"
            )
        env.groups = [group for group in recording.groups.get(name, ()) if group]
        if env.groups:
            env.put(_values_of(env.groups), "recorded")
        if name in recording.equal:
            env.level(recording.equal[name])
        if recording.sequences.get(name):
            told = list(recording.sequences[name])
            env.put({"sequences": drawn(told, [1.0] * len(told), _around(told))}, "recorded")
        if recording.tasks.get(name) is not None:
            env.put({"tasks": recording.tasks[name]}, "recorded")
        per_attempt = _rollouts_per_attempt(recording.steps, name, times)
        env.put({"group_scored": per_attempt > 1.5}, "recorded")
        if times.get(SLOWEST) and env.groups:
            size = round(statistics.median(len(group) for group in env.groups) / max(1.0, per_attempt))
            slowest = times[SLOWEST]
            mean = sum(seconds_of(step) * n for step, n in slowest.items()) / slowest.total()
            env.put({"alike": estimate_alike(env.values["latency_s"], mean, size)}, "recorded")
    told = [seconds for record in recording.steps for seconds in record.trained_s]
    if told:
        onto.step_s, onto.origins["trainer.step_s"] = _of_values(told), "recorded"
    else:
        notes.append("the run has no times of the trainer; what is assumed holds")
    loads = [seconds for record in recording.steps for seconds in record.loaded_s]
    if loads:
        onto.update_s, onto.origins["weights.update_s"] = _of_values(loads), "recorded"
    return notes


def split_latencies(recording: Recording, onto: Surroundings, engines: int) -> None:
    """Tell sampling apart from the rest of recorded latencies, where engines have a table of speeds.

    A rollout's tokens at the speed that the table gives for what ran at once in the recorded run are its sampling, at most
    all of its time.
    """
    inflight = [sum(env.inflight for env in record.envs.values()) for record in recording.steps]
    onto.recorded_concurrency = max(1.0, statistics.mean(inflight) / engines)
    each = Speeds(onto.tokens_per_s).each(onto.recorded_concurrency)
    for env in onto.envs.values():
        if env.origins["latency_s"] == "recorded":
            tokens = env.values["tokens"].mean
            if not env.groups:  # those of a rollout are recorded, those of a sequence stated
                tokens *= env.values["sequences"].mean
            env.engine_share = min(1.0, tokens / each / max(env.values["latency_s"].mean, TINY_S))


def _added_times(steps: Sequence[StepRecord], env: str) -> dict[str, Counter[int]]:
    found: dict[str, Counter[int]] = {}
    for record in steps:
        if env in record.envs:
            for way, counts in record.envs[env].times.items():
                found.setdefault(way, Counter()).update(counts)
    return found


def _env_values(ends: Ends) -> dict[str, Any]:
    completed = dict(ends.times.get("completed", {}))
    failed = Counter(ends.times.get("failed", {}))
    retried = ends.share.get("retryable", 0.0)
    for step, mass in ends.times.get("retryable", {}).items():
        failed[step] += mass  # type: ignore[assignment]  # a Counter adds any numbers
    failure = ends.share.get("failed", 0.0) + retried
    values: dict[str, Any] = {
        "failure": failure,
        "retryable": retried / failure if failure else 1.0,
        "failure_s": _of_steps(failed) if failed else None,
    }
    if completed:
        values["latency_s"] = _of_steps(completed)
    return values


def _of_steps(mass: Mapping[int, float]) -> Distribution:
    """Times of steps, each anywhere within its step."""
    steps = [step for step in sorted(mass) if mass[step] > 0]
    bounds = [(seconds_of(step - 0.5), seconds_of(step + 0.5)) for step in steps]
    return between(bounds, [mass[step] for step in steps])


def estimate_alike(latency: Distribution, slowest_s: float, size: int) -> float:
    """Which share of a group's rollouts takes as long as each other, by how slow the slowest of a group is on average.

    With none alike it is the slowest of `size` draws, with all alike a single draw.
    """
    if size < 2:
        return 0.0
    grid = [latency.at((place + 0.5) / GRID) for place in range(GRID)]
    expected = []
    for draws in range(1, size + 1):
        # The slowest of some draws is below a value as often as all of them are.
        below = [((place + 1) / GRID) ** draws for place in range(GRID)]
        weights = [high - low for low, high in zip([0.0, *below], below, strict=False)]
        expected.append(sum(value * weight for value, weight in zip(grid, weights, strict=True)))

    def slowest(alike: float) -> float:
        total = 0.0
        for common in range(size + 1):
            chance = math.comb(size, common) * alike**common * (1 - alike) ** (size - common)
            total += chance * expected[size - max(common, 1)]
        return total

    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if slowest(middle) > slowest_s else (low, middle)
    return round(low if low > 0.001 else 0.0, 3)


def _of_values(values: Sequence[float]) -> Distribution:
    return drawn(list(values), [1.0] * len(values), _around(values))


def _around(values: Sequence[float]) -> str:
    return f"mean {statistics.mean(values):.3g}, {min(values):.3g} to {max(values):.3g}"


def _values_of(groups: Sequence[Members]) -> dict[str, Any]:
    """For people, and where a file states one of them; whole groups are drawn otherwise."""
    rewards = [reward for group in groups for reward, _ in group]
    tokens = [float(max(1, n)) for group in groups for _, n in group]
    equal = [len({reward for reward, _ in group}) == 1 for group in groups if len(group) > 1]
    return {
        "reward": _of_values(rewards),
        "tokens": _of_values(tokens),
        "equal_rewards": statistics.mean(equal) if equal else 0.0,
    }


def _rollouts_per_attempt(steps: Sequence[StepRecord], env: str, times: Mapping[str, Counter[int]]) -> float:
    """More than one where whole groups are scored."""
    rollouts = sum(record.envs[env].outcomes.get("completed", 0) for record in steps if env in record.envs)
    attempts = times.get("completed", Counter[int]()).total()
    return rollouts / attempts if attempts else 1.0
