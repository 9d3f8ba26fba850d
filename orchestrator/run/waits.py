"""What a run waits for: one function that answers for every wait.

Every wait has an event that ends it, somebody who sends it, a bound, and a sentence; docs/architecture.md has the table
of all of them. The first entries are those of dispatch (why nothing more is started), then those of the next batch.
"""

from collections.abc import Callable

from orchestrator.dispatch.waits import Wait, WaitKind
from orchestrator.run.run import Run, RunState


def find_waits(run: Run, now: float) -> list[Wait]:
    """Everything that is waited for now, in the order of what is closest to people."""
    parts = run.parts
    closed = run.closed()
    if run.state is not RunState.RUNNING:
        return [closed] if closed is not None else []
    found = []
    explanation = parts.pool.explain()
    pause = run.control.wait()
    if pause is not None:
        found.append(pause)
    if explanation:
        found.append(Wait(WaitKind.ENDPOINT, f"an inference server: {explanation}"))
    elif pause is None:
        found += parts.dispatcher.waits(now)
    if run.weights.sending is not None:
        version, until = run.weights.sending
        text = f"the trainer to send version {version}; the inference servers stand still meanwhile"
        found.append(Wait(WaitKind.WEIGHTS, text, until=until))
    elif run.weights.refused:
        found.append(Wait(WaitKind.WEIGHTS, f"a version that can be loaded ({run.weights.refused})"))
    elif parts.versions.serving != parts.versions.published:
        found.append(
            Wait(
                WaitKind.WEIGHTS,
                f"the inference servers to load version {parts.versions.published} (they have {parts.versions.serving})",
            )
        )
    mixed = [name for name in parts.mix.mixed if name not in parts.mix.held]
    if parts.mix.quarantined.issuperset(mixed):
        names = ", ".join(f'"{name}"' for name in mixed)
        found.append(Wait(WaitKind.PROBES, f"probes: each env yields next to nothing ({names})"))
    batch = _batch_wait(run)
    if batch.kind not in [wait.kind for wait in found]:
        found.append(batch)
    if parts.evaluations.due and pause is None:
        names = ", ".join(f'"{name}"' for name in parts.evaluations.due)
        found.append(Wait(WaitKind.EVALUATION, f"the evaluation before, or the weights, for {names}"))
    return found


def _batch_wait(run: Run) -> Wait:
    """Why there is no further batch now."""
    parts = run.parts
    sink, buffer = parts.sink, parts.buffer
    text = sink.explain()
    if sink.finished:
        return Wait(WaitKind.DONE, text)
    if not sink.wanted:
        untrained = parts.versions.formed - parts.versions.trained
        return Wait(
            WaitKind.ACKNOWLEDGEMENT, f"the trainer ({untrained} batches are formed and not trained on)"
        )
    if sink.held is not None:
        env, version = sink.held
        text = f'a group of env "{env}" from version {version}, which a further batch would make too old'
        return Wait(WaitKind.OLDER_GROUP, text, until=run.held_until)
    if sink.awaited is not None:
        return Wait(WaitKind.SHARE, f"groups ({text})", until=run.held_until)
    if sink.stuck:
        at = buffer.split_at
        return (
            Wait(WaitKind.SPLIT, f"{text}; a group will be split", until=at)
            if at
            else Wait(WaitKind.MISFIT, text)
        )
    if sum(sink.queued().values()) >= sink.capacity and not buffer.can_take():
        kind = WaitKind.QUOTA if run.settings.batch.quotas else WaitKind.MINIMUM
        return Wait(kind, f"groups ({text})")
    return Wait(WaitKind.GROUPS, text)


def describe(waits: list[Wait]) -> str:
    """The waits of dispatch in one sentence, for a line in a terminal."""
    shown = [wait.text for wait in waits if wait.kind is not WaitKind.GROUPS]
    return "; ".join(shown or [wait.text for wait in waits])


def failing_for(run: Run, now: float) -> float:
    """Seconds since every env fails; a paused run stands still because somebody wants it to."""
    return 0.0 if run.paused else run.parts.mix.all_quarantined_for(now)


def end_by_failing(failing_s: float, timeout_s: float, failures: Callable[[], str]) -> str:
    """Why a run in which every env fails ends, with or without `exit_on_stall`; empty while it may go on."""
    if failing_s < timeout_s:
        return ""
    return f"every env has been failing for {failing_s:.0f} s: {failures()}"
