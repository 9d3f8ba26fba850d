"""What a person changes while a run goes on: each command alone, in virtual time, and what lasts over a restart."""

import re
from collections import Counter
from typing import Any

import pytest
import structlog

from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.waits import WaitKind
from orchestrator.mix import STRATEGIES
from orchestrator.run.changes import Changes
from orchestrator.run.commands import CommandError, parse_command
from orchestrator.run.control import Reply
from orchestrator.run.status import build_status
from orchestrator.simulate.neighbours import Behaviour
from orchestrator.tasks.evaluations import EvalPlan
from tests.support.scenarios import explain
from tests.support.worlds import NEVER, TestedWorld, make_world, quiet

STEADY = Behaviour(latency=lambda rng: 1.0)


def two(**options: Any) -> TestedWorld:
    """A run of two equal envs that has begun."""
    world = make_world({"a": STEADY, "b": STEADY}, **options)
    world.turn()
    return world


def changed(reply: Reply) -> str:
    """What a command that was followed says."""
    assert not reply.refused, reply.text
    assert reply.changed, reply.text
    return reply.text


def refused(world: TestedWorld, **command: Any) -> str:
    """Why a command is refused; it is not recorded, and nothing differs from before."""
    before = world.run.control.changes.state(), len(world.journal.controls), world.parts.mix.configured
    reply = world.tell(command)
    assert reply.refused, reply.text
    assert before == (
        world.run.control.changes.state(),
        len(world.journal.controls),
        world.parts.mix.configured,
    )
    return reply.text


def delivered(world: TestedWorld, *, since: int) -> dict[str, float]:
    """Each env's share of the batches that were trained on since."""
    counts: Counter[str] = Counter()
    for _, _, batch in world.trained[since:]:
        for group in batch.groups:
            counts[group.env] += group.size
    return {env: n / counts.total() for env, n in counts.items()}


def restarted(world: TestedWorld) -> list[str]:
    """Kill the process and start another one; returns what it says about changes that it dropped."""
    with structlog.testing.capture_logs() as logs:
        world.kill()
    return [entry["what"] for entry in logs if entry["event"] == "control.dropped"]


# --- pause, resume, drain ------------------------------------------------------------------------------------------


def test_a_paused_run_opens_nothing_and_says_who_paused_it() -> None:
    """What is in flight ends, what is formed is trained on, and the wait has its remedy."""
    world = two()
    assert world.play(until=lambda: world.steps() >= 2)
    changed(world.tell({"command": "pause"}, by="cli uid 7 pid 8"))
    started = world.ledger.dispatched[Lane.TRAIN, "a"] + world.ledger.dispatched[Lane.TRAIN, "b"]
    opened = {id(group) for group in world.open_groups()}
    world.play(until=lambda: {id(group) for group in world.open_groups()} - opened != set())
    assert world.ledger.total_inflight == 0
    assert world.parts.versions.trained == world.parts.versions.formed
    wait = world.wait(WaitKind.PAUSED)
    assert wait is not None
    assert wait.text.startswith("a resume (paused since 1970-01-01 00:00:0")
    assert wait.text.endswith("by cli uid 7 pid 8)")
    assert "orchestrator ctl" in wait.remedy
    assert build_status(world.run, world.now).waiting_for.startswith("a resume (paused since")
    ended = world.ledger.dispatched[Lane.TRAIN, "a"] + world.ledger.dispatched[Lane.TRAIN, "b"]
    assert ended - started <= 8, "only what was open may start"


def test_a_resumed_run_goes_on_to_its_end() -> None:
    """A pause and its end leave nothing behind."""
    world = two(max_steps=6)
    world.tell({"command": "pause"})
    world.at(500.0, lambda: changed(world.tell({"command": "resume"})))
    assert world.play(until=lambda: bool(world.ended)), explain(world)
    assert world.steps() == 6
    assert world.now > 500.0
    assert [command["command"] for _, _, command in world.journal.controls] == ["pause", "resume"]


def test_what_holds_already_changes_nothing() -> None:
    """A pause of a paused run is no mistake, and is not recorded again."""
    world = two()
    world.tell({"command": "pause"})
    again = world.tell({"command": "pause"})
    assert (again.refused, again.changed) == (False, False)
    assert "it is paused already, since" in again.text
    world.tell({"command": "resume"})
    assert "it is not paused" in world.tell({"command": "resume"}).text
    assert len(world.journal.controls) == 2


def test_a_pause_does_not_last_over_a_restart() -> None:
    """The next process runs."""
    world = two(max_steps=3)
    world.tell({"command": "pause"})
    restarted(world)
    assert world.wait(WaitKind.PAUSED) is None
    assert world.play(until=lambda: bool(world.ended)), explain(world)


def test_evaluations_are_paused_too() -> None:
    """One that is under way hands out no further task, and one that is due does not start."""
    plan = EvalPlan(env="e", split="eval", num_examples=100, rollouts_per_example=1, interval=1)
    world = make_world({"a": STEADY, "e": STEADY}, evals=[plan], max_inflight=8, max_steps=2)
    world.turn()
    world.tell({"command": "pause"})
    handed_out = world.ledger.dispatched[Lane.EVAL, "e"]
    world.play(until=lambda: not world.ledger.total_inflight)
    assert world.ledger.dispatched[Lane.EVAL, "e"] == handed_out > 0
    world.tell({"command": "resume"})
    assert world.play(until=lambda: bool(world.ended)), explain(world)
    assert world.eval_results


def test_a_run_that_is_paused_in_its_last_step_does_not_end_without_the_last_evaluation() -> None:
    """It is due when the step is trained on, and starts when the run goes on."""
    plan = EvalPlan(env="e", split="eval", num_examples=2, rollouts_per_example=1, interval=100)
    world = make_world({"a": STEADY, "e": STEADY}, evals=[plan], max_steps=2, train_s=5.0)
    assert world.play(until=lambda: world.parts.versions.formed == 2), explain(world)
    assert world.run.acknowledged < 2
    changed(world.tell({"command": "pause"}))
    world.play(until=lambda: bool(world.ended))
    assert world.run.all_acknowledged
    assert not world.ended
    assert world.wait(WaitKind.PAUSED) is not None
    changed(world.tell({"command": "resume"}))
    assert world.play(until=lambda: bool(world.ended)), explain(world)
    assert [(result["step"], result["version"]) for result in world.eval_results] == [(0, 0), (2, 2)]


def test_a_drained_run_ends_when_its_open_groups_have() -> None:
    """And takes no further command."""
    world = two()
    assert world.play(until=lambda: world.steps() >= 1)
    changed(world.tell({"command": "drain"}, by="me"))
    assert "the run is draining" in refused(world, command="pause")
    assert world.play(until=lambda: bool(world.ended))
    assert world.ended == "drained by me"
    assert world.ledger.total_inflight == 0


def test_no_command_is_taken_before_the_start() -> None:
    """Nor harms anything."""
    world = make_world({"a": STEADY}, max_steps=1)
    assert "the run is starting" in refused(world, command="pause")
    assert world.play(until=lambda: bool(world.ended))
    assert "the run is over: max_steps reached" in refused(world, command="pause")


# --- ratio ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_ratio_changes_what_is_delivered(strategy: str) -> None:
    """With every strategy that comes along, and at once."""
    world = two(strategy=strategy, batch_size=32, max_steps=60, seed=3)
    assert world.play(until=lambda: world.steps() >= 10)
    told = changed(world.tell({"command": "ratio", "envs": {"a": 1.5}}))
    assert told == "ratio of env a: 0.5 -> 1.5 (targets now: a 75.0%, b 25.0%)"
    assert world.play(until=lambda: bool(world.ended)), explain(world)
    assert delivered(world, since=20)["a"] == pytest.approx(0.75, abs=0.06)
    status = build_status(world.run, world.now)
    assert status.envs["a"].target == pytest.approx(0.75)


def test_quotas_follow_a_ratio() -> None:
    """Every batch has the new share, as nearly as whole groups allow."""
    world = two(batch_size=16, quotas=True, max_steps=12)
    assert world.play(until=lambda: world.steps() >= 3)
    changed(world.tell({"command": "ratio", "envs": {"a": 1.5}}))
    assert world.play(until=lambda: bool(world.ended)), explain(world)
    assert delivered(world, since=8)["a"] == pytest.approx(0.75, abs=0.05)


def test_an_env_whose_ratio_is_nothing_gets_no_rollouts() -> None:
    """What is open of it still ends."""
    world = two(max_steps=10)
    changed(world.tell({"command": "ratio", "envs": {"b": 0.0}}))
    handed_out = world.ledger.dispatched[Lane.TRAIN, "b"]
    assert world.play(until=lambda: bool(world.ended)), explain(world)
    assert world.ledger.dispatched[Lane.TRAIN, "b"] <= handed_out + 4


@pytest.mark.parametrize(
    ("envs", "why"),
    [
        ({"c": 1.0}, 'there is no env "c"; there are: a, b'),
        ({"a": -0.5}, 'ratio of env "a": -0.5 is not a finite number of at least 0'),
        ({"a": float("inf")}, 'ratio of env "a": inf is not a finite number of at least 0'),
        ({"a": 0.0, "b": 0.0}, "every weight is 0"),
        ({"a": 0.0}, "min_batch_allocation is 0.25 but its ratio is 0"),
        ({"a": 1e-13}, "too small"),
        ({}, "ratio names no env"),
    ],
)
def test_ratios_that_make_no_mix_are_refused(envs: dict[str, float], why: str) -> None:
    """As they would be in a configuration, and nothing changes."""
    minimum = 0.25 if list(envs) == ["a"] and envs["a"] == 0 else 0.0
    world = two(train={"a": {"minimum": minimum}})
    assert why in refused(world, command="ratio", envs=envs)


def test_a_ratio_lasts_over_a_restart_and_ends_with_its_own_value() -> None:
    """Set back to what the configuration says, it is no difference any more."""
    world = two()
    world.tell({"command": "ratio", "envs": {"a": 1.5}}, by="me")
    (line,) = build_status(world.run, world.now).changes
    assert line == "ratio of env a: 0.5 -> 1.5 (since 1970-01-01 00:00:00 UTC, by me)"
    assert restarted(world) == []
    assert world.parts.mix.configured == (0.75, 0.25)
    assert build_status(world.run, world.now).changes == [line]
    changed(world.tell({"command": "ratio", "envs": {"a": 0.5}}))
    assert build_status(world.run, world.now).changes == []
    assert world.parts.mix.configured == (0.5, 0.5)


def test_a_configuration_that_changed_the_same_ratio_wins() -> None:
    """The difference is dropped, and the log says so; another env's stays."""
    world = make_world({"a": STEADY, "b": STEADY, "c": STEADY})
    world.turn()
    world.tell({"command": "ratio", "envs": {"a": 1.0, "b": 2.0}})
    other = make_world({"a": STEADY, "b": STEADY, "c": STEADY}, train={"a": {"target": 0.2}})
    world.settings = other.settings
    assert restarted(world) == ['the ratio 1 of env "a"']
    (line,) = build_status(world.run, world.now).changes
    assert line.startswith("ratio of env b: 0.333333 -> 2")


# --- quarantine ----------------------------------------------------------------------------------------------------


def test_an_env_quarantined_by_hand_gets_nothing_until_it_is_restored() -> None:
    """No probes, its minimum is waived even where it would be waited for, and the status says by hand."""
    world = two(
        train={"b": {"minimum": 0.25, "on_unmet_minimum": "wait"}},
        strategy_options={"breaker": True},
    )
    assert world.play(until=lambda: world.steps() >= 2)
    changed(world.tell({"command": "quarantine", "env": "b"}, by="me"))
    assert world.play(until=lambda: not world.ledger.inflight[Lane.TRAIN, "b"])
    handed_out, steps = world.ledger.dispatched[Lane.TRAIN, "b"], world.steps()
    assert world.play(until=lambda: world.steps() >= steps + 20), explain(world)
    assert world.ledger.dispatched[Lane.TRAIN, "b"] == handed_out
    status = build_status(world.run, world.now)
    assert status.envs["b"].quarantined
    assert status.envs["b"].held.endswith("by me")
    assert status.envs["b"].minimum_waived == "it is quarantined by hand"
    assert world.wait(WaitKind.QUARANTINE) is not None
    changed(world.tell({"command": "restore", "env": "b"}))
    assert world.play(until=lambda: world.steps() >= steps + 40), explain(world)
    assert delivered(world, since=steps + 26)["b"] == pytest.approx(0.5, abs=0.1)
    assert build_status(world.run, world.now).changes == []


def test_a_quarantine_by_hand_lasts_over_a_restart() -> None:
    """Until it is restored by hand."""
    world = two()
    world.tell({"command": "quarantine", "env": "b"})
    restarted(world)
    handed_out, steps = world.ledger.dispatched[Lane.TRAIN, "b"], world.steps()
    assert world.play(until=lambda: world.steps() >= steps + 5), explain(world)
    assert world.ledger.dispatched[Lane.TRAIN, "b"] == handed_out
    world.tell({"command": "restore", "env": "b"})
    assert world.play(until=lambda: world.ledger.dispatched[Lane.TRAIN, "b"] > handed_out)


def test_the_last_env_cannot_be_quarantined_nor_left_without_a_ratio() -> None:
    """A run in which nothing could start is a paused one."""
    world = two()
    world.tell({"command": "quarantine", "env": "b"})
    assert "is the last one that gets rollouts; pause the run instead" in refused(
        world, command="quarantine", env="a"
    )
    assert "every env that would be left is quarantined by hand" in refused(
        world, command="ratio", envs={"a": 0.0}
    )


def test_an_env_that_the_breaker_left_out_can_be_restored_by_hand() -> None:
    """It is judged anew, as at the start."""
    broken = Behaviour(latency=lambda rng: 1.0, loss=1.0, retryable=0.0)
    world = make_world({"a": STEADY, "b": broken}, strategy_options={"breaker": True})
    assert world.play(until=lambda: "b" in world.parts.mix.quarantined)
    world.behaviours["b"] = STEADY
    changed(world.tell({"command": "restore", "env": "b"}))
    assert not world.parts.mix.quarantined
    steps = world.steps()
    assert world.play(until=lambda: world.steps() >= steps + 30)
    assert delivered(world, since=steps + 15)["b"] == pytest.approx(0.5, abs=0.1)


def test_an_unknown_env_is_neither_quarantined_nor_restored() -> None:
    """The answer names those that there are."""
    world = two()
    assert refused(world, command="quarantine", env="x") == 'there is no env "x"; there are: a, b'
    assert refused(world, command="restore", env="x") == 'there is no env "x"; there are: a, b'
    assert "is not quarantined" in world.tell({"command": "restore", "env": "a"}).text


# --- eval, max-inflight, endpoints -----------------------------------------------------------------------------------


def test_an_evaluation_can_be_asked_for() -> None:
    """It runs with the version that is loaded, beside those that come by steps."""
    plan = EvalPlan(env="e", split="eval", num_examples=2, rollouts_per_example=1, interval=1000)
    world = make_world({"a": STEADY, "e": STEADY}, evals=[plan])
    assert world.play(until=lambda: world.steps() >= 3)
    assert len(world.eval_results) == 1
    changed(world.tell({"command": "eval"}))
    assert world.play(until=lambda: len(world.eval_results) == 2)
    changed(world.tell({"command": "eval", "env": "e"}))
    assert world.play(until=lambda: len(world.eval_results) == 3)
    assert world.eval_results[-1]["step"] >= 3
    assert refused(world, command="eval", env="x") == 'there is no evaluation env "x"; there are: e'
    assert "has no [[eval.env]]" in refused(two(), command="eval")


def test_the_limit_of_rollouts_in_flight_can_be_changed() -> None:
    """Up and down, at once; what is above it ends."""
    world = quiet(max_inflight=64, batch_size=64)
    world.turn()
    assert world.ledger.total_inflight == 64
    assert changed(world.tell({"command": "max-inflight", "value": 100})) == "max_inflight: 64 -> 100"
    world.turn()
    assert world.ledger.total_inflight == 100
    world.tell({"command": "max-inflight", "value": 8})
    assert "below 1" in refused(world, command="max-inflight", value=0)
    for attempt in world.starts[:95]:
        world.finish(attempt)
    world.turn()
    assert world.ledger.total_inflight == 8
    restarted(world)
    assert build_status(world.run, world.now).changes[0].startswith("max_inflight: 64 -> 8 (since")
    assert "is 8 already" in world.tell({"command": "max-inflight", "value": 8}).text


def test_inference_servers_come_and_go_with_nothing_lost() -> None:
    """Rollouts on one that is removed end there; the last one stays."""
    world = two(max_steps=8)
    first, second = world.pool.endpoint.url, "http://second/v1"
    assert refused(world, command="endpoint", action="remove", url=first)
    changed(world.tell({"command": "endpoint", "action": "add", "url": second + "/"}))
    running = world.ledger.total_inflight
    changed(world.tell({"command": "endpoint", "action": "remove", "url": first}))
    assert world.ledger.total_inflight == running
    assert [line.partition(" (")[0] for line in build_status(world.run, world.now).changes] == [
        f"inference server added: {second}",
        f"inference server removed: {first}",
    ]
    assert world.play(until=lambda: bool(world.ended)), explain(world)
    assert [one.url for one in world.pool.endpoints] == [second]
    assert world.ledger.totals(Lane.TRAIN)["failed"] == 0


# --- what sources say, and a person's word ----------------------------------------------------------------------------

SOURCE = "dns+http://vllm:8000/v1"
NAMED = "http://10.0.0.7:8000/v1"


def urls(world: TestedWorld) -> list[str]:
    return [one.url for one in world.pool.endpoints if not one.leaving]


def test_a_named_inference_server_joins_and_leaves_with_nothing_lost() -> None:
    """It is no difference from the configuration, because the configuration names its source."""
    world = two(max_steps=8)
    first = world.pool.endpoint.url
    world.run.on_endpoint_found(NAMED, SOURCE, world.now)
    assert urls(world) == [first, NAMED]
    assert build_status(world.run, world.now).endpoints[1].source == SOURCE
    assert world.play(until=lambda: world.steps() >= 3)
    world.run.on_endpoint_gone(NAMED, world.now)
    assert urls(world) == [first]
    assert build_status(world.run, world.now).changes == []
    assert world.play(until=lambda: bool(world.ended)), explain(world)
    assert world.ledger.totals(Lane.TRAIN)["failed"] == 0


def test_one_that_a_person_has_removed_does_not_join_while_its_source_names_it() -> None:
    """Added by hand it is back; and once the source has dropped it, whoever gets its address is another one."""
    world = two()
    world.run.on_endpoint_found(NAMED, SOURCE, world.now)
    changed(world.tell({"command": "endpoint", "action": "remove", "url": NAMED}))
    world.run.on_endpoint_found(NAMED, SOURCE, world.now)
    assert NAMED not in urls(world)
    changed(world.tell({"command": "endpoint", "action": "add", "url": NAMED}))
    assert NAMED in urls(world)
    assert not world.run.control.changes.added, "it is the source's again"
    changed(world.tell({"command": "endpoint", "action": "remove", "url": NAMED}))
    with structlog.testing.capture_logs() as logs:
        world.run.on_endpoint_gone(NAMED, world.now)
    assert [entry["what"] for entry in logs if entry["event"] == "control.dropped"] == [
        f"the removal of the inference server {NAMED}"
    ]
    assert world.journal.recover().state["control"]["removed"] == {}
    world.run.on_endpoint_found(NAMED, SOURCE, world.now)
    assert NAMED in urls(world)


def test_one_that_a_person_has_added_stays_when_its_source_drops_it() -> None:
    """Until a person removes it."""
    world = two()
    changed(world.tell({"command": "endpoint", "action": "add", "url": NAMED}))
    world.run.on_endpoint_found(NAMED, SOURCE, world.now)
    world.run.on_endpoint_gone(NAMED, world.now)
    assert NAMED in urls(world)
    changed(world.tell({"command": "endpoint", "action": "remove", "url": NAMED}))
    assert NAMED not in urls(world)


def test_removals_of_named_servers_last_over_a_restart() -> None:
    """The configuration does not list them, but names a source that may."""
    state = {"removed": {NAMED: {"at": 0.0, "by": "cli"}}, "added": {"http://b/v1": {"at": 0.0, "by": "cli"}}}
    rest: dict[str, Any] = {"ratios": {}, "max_inflight": 8}
    kept = Changes.load(state)
    assert kept.against(endpoints=[], sourced=True, **rest) == []
    assert list(kept.removed) == [NAMED]
    assert kept.endpoints([], sourced=True) == ([], ["http://b/v1"])
    dropped = Changes.load(state)
    assert dropped.against(endpoints=["http://a/v1"], sourced=False, **rest) == [
        f"the removal of the inference server {NAMED}"
    ]


# --- what is no command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("pause", "a command is an object"),
        ({}, "a command is an object"),
        ({"command": "explode"}, 'there is no command "explode"; there are: pause, resume'),
        ({"command": "pause", "for": 3}, "pause: Object contains unknown field `for`"),
        ({"command": "ratio", "envs": {"a": "much"}}, "ratio: Expected `float`, got `str`"),
        ({"command": "max-inflight", "value": 1.5}, "max-inflight: Expected `int`"),
        ({"command": "endpoint", "action": "paint", "url": "http://x"}, "endpoint: Invalid enum value"),
    ],
)
def test_what_is_no_command_is_told_why(value: object, why: str) -> None:
    """Before the run hears of it."""
    with pytest.raises(CommandError, match=f"^{re.escape(why)}"):
        parse_command(value)


def test_every_change_is_recorded_with_its_time_and_its_origin() -> None:
    """An address is recorded without its credentials."""
    world = two()
    world.play(until=lambda: world.now >= 3.0)
    world.tell({"command": "endpoint", "action": "add", "url": "http://me:secret@other/v1"}, by="cli uid 1")
    assert world.journal.controls == [
        (world.now, "cli uid 1", {"command": "endpoint", "action": "add", "url": "http://other/v1"})
    ]
    assert "secret" not in str(build_status(world.run, world.now).changes)


def test_a_run_that_is_never_resumed_says_so_for_ever() -> None:
    """Nothing is due, nothing is in flight, and the wait is told."""
    world = make_world({"a": Behaviour(latency=lambda rng: NEVER)}, rollout_timeout_s=10.0, max_attempts=1)
    world.turn()
    world.tell({"command": "pause"})
    assert not world.play(until=lambda: bool(world.ended))
    assert world.ledger.total_inflight == 0
    assert world.wait(WaitKind.PAUSED) is not None
