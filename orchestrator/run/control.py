"""What a person changes while the run goes on: each command is refused with the reason, or changes the parts at once.

The run calls it through its one door (`Run.on_control`); what follows from a change is decided by the next `advance`.
A command that is refused has changed nothing. Invariant: an env that has a share and is not quarantined by hand is
always left. `paused` ends with the process, `changes` last over a restart. Pure: time comes with the command.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from envs.addresses import shown_url
from orchestrator.dispatch.waits import Wait, WaitKind
from orchestrator.errors import OrchestratorError
from orchestrator.run.changes import Change, Changes, Mark
from orchestrator.run.commands import (
    Command,
    Drain,
    Endpoint,
    Evaluate,
    MaxInflight,
    Origin,
    Pause,
    Quarantine,
    Ratio,
    Restore,
    Resume,
)
from orchestrator.run.parts import Parts
from orchestrator.run.settings import RunSettings

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a command, as a sentence; `refused` and what was so already change nothing."""

    text: str
    refused: bool = False
    changed: bool = True


def _refuse(why: str) -> Reply:
    return Reply(why, refused=True, changed=False)


def _as_it_is(text: str) -> Reply:
    return Reply(f"nothing changed: {text}", changed=False)


class Control:
    """Applies commands to the parts of a run."""

    def __init__(self, settings: RunSettings, parts: Parts) -> None:
        self._configured = settings.changeable
        self._parts = parts
        self.paused: Origin | None = None
        """Who has paused the run, and when; None while nobody has."""
        self.changes = Changes()
        """How the run differs from its configuration."""

    def wait(self) -> Wait | None:
        """What is waited for while the run is paused."""
        return None if self.paused is None else Wait(WaitKind.PAUSED, f"a resume (paused {self.paused})")

    def apply(self, command: Command, origin: Origin) -> Reply:
        """Change what the command says, or say why not."""
        match command:
            case Pause():
                return self._pause(origin)
            case Resume():
                return self._resume()
            case Drain():
                return Reply("draining: open groups end, what is finished is saved, then the run exits")
            case Ratio(envs):
                return self._set_ratios(envs, origin)
            case Quarantine(env):
                return self._quarantine(env, origin)
            case Restore(env):
                return self._restore(env)
            case Evaluate(env):
                return self._evaluate(env)
            case MaxInflight(value):
                return self._set_max_inflight(value, origin)
            case Endpoint(action, url):
                url = url.rstrip("/")
                return self._add(url, origin) if action == "add" else self._remove(url, origin)

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Apply what an earlier process of the run had changed, before the mix gets its state back.

        The pool of inference servers is built with its part of it.
        """
        self.changes = changes = Changes.load(state)
        configured = self._configured
        for what in changes.against(
            ratios=configured.ratios,
            max_inflight=configured.max_inflight,
            endpoints=configured.endpoints,
            sourced=configured.sourced,
        ):
            log.warning("control.dropped", what=what, why="the configuration was changed meanwhile")
        if changes.ratios:
            problem = self._retarget({env: change.value for env, change in changes.ratios.items()})
            if problem:
                log.warning("control.dropped", what="the ratios that were changed by hand", why=problem)
                changes.ratios.clear()
        for env in list(changes.quarantined):
            if self._is_last(env):
                log.warning("control.dropped", what=f'the quarantine of env "{env}"', why="no other is left")
                del changes.quarantined[env]
            else:
                self._parts.mix.hold(env)

    # --- each command ------------------------------------------------------------------------------------------------

    def _pause(self, origin: Origin) -> Reply:
        if self.paused is not None:
            return _as_it_is(f"it is paused already, {self.paused}")
        self.paused = origin
        self._parts.evaluations.paused = True
        return Reply("paused: no new groups are opened, open ones end, batches that are formed are served")

    def _resume(self) -> Reply:
        if self.paused is None:
            return _as_it_is("it is not paused")
        since, self.paused = self.paused, None
        self._parts.evaluations.paused = False
        return Reply(f"resumed; it was paused {since}")

    def _set_ratios(self, envs: Mapping[str, float], origin: Origin) -> Reply:
        configured = self._configured.ratios
        if not envs:
            return _refuse("ratio names no env")
        for env, ratio in envs.items():
            if env not in configured:
                return _refuse(_unknown(env, configured))
            if not math.isfinite(ratio) or ratio < 0:
                return _refuse(f'ratio of env "{env}": {ratio:g} is not a finite number of at least 0')
        before = {env: change.value for env, change in self.changes.ratios.items()}
        wanted = {env: ratio for env, ratio in (before | dict(envs)).items() if ratio != configured[env]}
        if wanted == before:
            return _as_it_is("these ratios hold already")
        problem = self._retarget(wanted)
        if problem:
            return _refuse(problem)
        was = {env: before.get(env, configured[env]) for env in envs}
        ratios = self.changes.ratios
        for env in before.keys() - wanted.keys():
            del ratios[env]
        for env in wanted.keys() & envs.keys():
            ratios[env] = Change(configured[env], wanted[env], origin.at, origin.by)
        told = "; ".join(
            f"ratio of env {env}: {'by its number of tasks' if was[env] is None else f'{was[env]:g}'} -> {ratio:g}"
            for env, ratio in envs.items()
        )
        mix = self._parts.mix
        shares = ", ".join(
            f"{env} {share:.1%}" for env, share in zip(mix.env_names, mix.configured, strict=True)
        )
        return Reply(f"{told} (targets now: {shares})")

    def _retarget(self, ratios: Mapping[str, float]) -> str:
        """Have the mix follow the targets that these ratios make; why not, or nothing."""
        parts = self._parts
        try:
            targets = self._configured.targets(ratios)
            mixed = [env for env, target in targets.items() if target > 0]
            if parts.mix.held.issuperset(mixed):
                return "every env that would be left is quarantined by hand; restore one first"
            parts.mix.set_weights([targets[env] for env in parts.mix.env_names])
        except OrchestratorError as error:
            return str(error)
        parts.buffer.set_quotas(targets)
        parts.facts.targets.update(targets)
        return ""

    def _quarantine(self, env: str, origin: Origin) -> Reply:
        mix, marks = self._parts.mix, self.changes.quarantined
        if env not in self._parts.train:
            return _refuse(_unknown(env, self._parts.train))
        if env in marks:
            return _as_it_is(f'env "{env}" is quarantined by hand already')
        if self._is_last(env):
            return _refuse(f'env "{env}" is the last one that gets rollouts; pause the run instead')
        mix.hold(env)
        marks[env] = Mark(origin.at, origin.by)
        return Reply(f'env "{env}" is quarantined by hand: it gets no rollouts and no probes until restored')

    def _is_last(self, env: str) -> bool:
        """Whether no other env that has a share would be left."""
        mix = self._parts.mix
        return not set(mix.mixed) - mix.held - {env}

    def _restore(self, env: str) -> Reply:
        mix = self._parts.mix
        if env not in self._parts.train:
            return _refuse(_unknown(env, self._parts.train))
        if env not in mix.quarantined:
            return _as_it_is(f'env "{env}" is not quarantined')
        mix.release(env)
        self.changes.quarantined.pop(env, None)
        return Reply(f'env "{env}" is restored, and judged anew')

    def _evaluate(self, env: str | None) -> Reply:
        evaluations = self._parts.evaluations
        if not evaluations.envs:
            return _refuse("there is nothing to evaluate: the configuration has no [[eval.env]]")
        if env is not None and env not in evaluations.envs:
            return _refuse(_unknown(env, evaluations.envs, "evaluation env"))
        asked = evaluations.envs if env is None else [env]
        for name in asked:
            evaluations.ask(name, self._parts.versions.serving)
        when = "on resume" if self.paused is not None else "now, or when one that is under way has ended"
        return Reply(f"evaluation of {', '.join(asked)}: starts {when}")

    def _set_max_inflight(self, value: int, origin: Origin) -> Reply:
        configured = self._configured.max_inflight
        change = self.changes.max_inflight
        now = configured if change is None else change.value
        if value == now:
            return _as_it_is(f"max_inflight is {value} already")
        why = self._parts.pool.refuse_max_inflight(value)
        if why:
            return _refuse(why)
        self._parts.pool.set_max_inflight(value)
        same = value == configured
        self.changes.max_inflight = None if same else Change(configured, value, origin.at, origin.by)
        return Reply(f"max_inflight: {now} -> {value}")

    def _add(self, url: str, origin: Origin) -> Reply:
        why = self._parts.pool.refuse_add(url)
        if why:
            return _refuse(why)
        self._parts.pool.add_endpoint(url)
        if self.changes.removed.pop(url, None) is None and url not in self._configured.endpoints:
            self.changes.added[url] = Mark(origin.at, origin.by)
        return Reply(f"inference server added: {shown_url(url)}; it gets work once it has the newest weights")

    def _remove(self, url: str, origin: Origin) -> Reply:
        why = self._parts.pool.refuse_remove(url)
        if why:
            return _refuse(why)
        self._parts.pool.remove_endpoint(url)
        if self.changes.added.pop(url, None) is None:
            self.changes.removed[url] = Mark(origin.at, origin.by)
        return Reply(f"inference server removed: {shown_url(url)}; rollouts on it end, it gets no new ones")

    # What sources say, which a person's word beats. --------------------------------------------------------------------

    def found(self, url: str, source: str) -> None:
        """A source names an inference server: it joins, unless somebody has removed it."""
        if url in self.changes.removed:
            log.info(
                "endpoint.held_out", endpoint=shown_url(url), source=source, why="it was removed by hand"
            )
        else:
            self._parts.pool.take_in(url, source)

    def gone(self, url: str) -> bool:
        """No source names an inference server any more: it leaves, unless somebody has added it.

        Whoever has its address later is another one, so that a removal by hand ends here; whether one did.
        """
        if url not in self.changes.added:
            self._parts.pool.let_go(url)
        if url in self._configured.endpoints or self.changes.removed.pop(url, None) is None:
            return False
        log.info(
            "control.dropped",
            what=f"the removal of the inference server {shown_url(url)}",
            why="no source names it any more",
        )
        return True


def _unknown(env: str, known: Mapping[str, object] | Sequence[str], what: str = "env") -> str:
    return f'there is no {what} "{env:.100}"; there are: {", ".join(known)}'
