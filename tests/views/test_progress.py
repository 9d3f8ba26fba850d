"""What a person sees: the live display and the closing summary."""

import asyncio
import io
import re
from typing import Any

import pytest
from rich.console import Console

from orchestrator.facts import EndpointStatus, ReportStatus, SourceStatus, TrackerStatus
from orchestrator.views.lines import sources
from orchestrator.views.progress import render, show_progress
from orchestrator.views.summary import print_summary
from tests.support.sample_status import env_status, sample_status


def console(width: int = 120, *, terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=terminal, color_system=None), out


def shown(status: Any, width: int = 120) -> str:
    target, out = console(width)
    target.print(render(status))
    return out.getvalue()


def test_the_display_shows_the_run() -> None:
    """Step, reward, version, in flight, rates and queue are on the first line; the time that is left stands behind them."""
    lines = shown(sample_status()).splitlines()
    first = " ".join(lines[0].split())
    assert (
        first
        == "step 5/20 reward 0.750 version 4 in flight 12/64 rollouts/s 37 tokens/s 9.1k queued 8/32 62 s"
    )
    assert lines[1].strip() == "left 13 min"
    assert "left" not in shown(sample_status(eta_s=None))


@pytest.mark.parametrize(
    ("queued", "text"),
    [(0, "queued 0/32"), (32, "queued 32/32"), (40, "queued 40 (1.2 batches)"), (168, "(5.2 batches)")],
)
def test_a_queue_of_more_than_a_batch_is_told_in_batches(queued: int, text: str) -> None:
    """More than the whole would look like a mistake."""
    assert text in shown(sample_status(queued_sequences=queued))


def test_the_display_shows_how_rewards_went() -> None:
    """A bar for each of the last steps, from the second step on; without bars where the encoding has none."""
    rising = env_status(rewards=[0.0, 0.25, None, 0.75, 1.0])
    out = shown(sample_status(envs={"math": rising, "code": env_status(rewards=[0.5])}))
    assert "trend" in out
    assert "▁▃ ▆█" in out
    assert "trend" not in shown(sample_status(envs={"math": env_status(rewards=[0.5])}))
    target = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=120)
    with target.capture() as captured:
        target.print(render(sample_status(envs={"math": rising}, reward=0.5)))
    assert "_- +#" in captured.get()


def test_servers_are_one_line_that_names_the_envs_that_lack_some() -> None:
    """Inference servers and env servers, ready of all."""
    well = env_status(servers_ready=2, servers=2)
    assert "1/1 engines, 2/2 servers\n" in shown(sample_status(envs={"math": well}))
    lost = EndpointStatus("http://b/v1", healthy=False, inflight=0, version=3, error="HTTP 503")
    envs = {"math": well, **{f"e{n}": env_status(servers_ready=0, servers=1) for n in range(5)}}
    out = shown(sample_status(envs=envs, endpoints=[lost]))
    assert "0/1 engines, 2/7 servers (e0 0/1, e1 0/1, e2 0/1 and 2 more)" in out


def evaluation(env: str, step: int, score: float | None) -> dict[str, Any]:
    return {"env": f"eval-{env}", "step": step, "k": 4, "avg@4": score, "failures": 0}


def test_the_last_evaluation_of_each_env_is_shown_with_its_change() -> None:
    """Against the evaluation before; one without a score changes nothing."""
    results = [
        evaluation("math", 0, 0.25),
        evaluation("code", 0, None),
        evaluation("math", 10, None),
        evaluation("math", 20, 0.5),
        evaluation("chat", 20, 0.125),
    ]
    (line,) = [line for line in shown(sample_status(evals=results)).splitlines() if line.startswith("evals")]
    assert line.split("   ")[1:] == [
        "math avg@4 0.500 +0.250 (step 20)",
        "code avg@4 – (step 0)",
        "chat avg@4 0.125 (step 20)",
    ]


def test_sources_are_told_with_what_they_name_and_what_is_wrong_with_them() -> None:
    """A source that answers is no trouble; one that does not is shown with its reason."""
    well = SourceStatus("dns+tcp://envs:7000", 'env "math"', 3, "")
    silent = SourceStatus("file:engines.txt", "inference", 0, "it names no server")
    status = sample_status(sources=[well, silent])
    out = shown(status)
    assert "source of inference: file:engines.txt: it names no server" in out
    assert "envs:7000" not in out
    assert sources(status) == [
        'dns+tcp://envs:7000 names 3 of env "math"',
        "file:engines.txt names 0 of inference (it names no server)",
    ]


def test_trackers_and_a_full_disk_are_troubles() -> None:
    """As long as there is one; a tracker that takes everything needs no line."""
    trackers = [
        TrackerStatus("wandb", 3, 2, "it has not come back for 40 s"),
        TrackerStatus("tensorboard", 5, 0, ""),
    ]
    out = shown(sample_status(trackers=trackers, disk_free_bytes=400_000_000))
    assert 'tracker "wandb": it has not come back for 40 s (2 of 5 lines lost)' in out
    assert "tensorboard" not in out
    assert "the disk of the run directory has 0.4 GB left" in out
    assert "disk" not in shown(sample_status(disk_free_bytes=10**12))


def test_what_was_changed_by_hand_is_shown() -> None:
    """A line each, so that nobody wonders why the run is not as its configuration says; many are counted."""
    out = shown(sample_status(changes=[f"max_inflight: {n} -> 64 (http, 12:00)" for n in range(6)]))
    assert "by hand: max_inflight: 0 -> 64 (http, 12:00)" in out
    assert "and 2 more changes by hand" in out
    assert "by hand" not in shown(sample_status())


def test_more_envs_than_lines_are_counted() -> None:
    """In the live display, so that what is waited for stays in the picture; what is shown once, or piped, is whole."""
    envs = {f"e{number}": env_status(domain=f"e{number}") for number in range(40)}
    status = sample_status(envs=envs, waiting_for="the trainer")
    out = io.StringIO()
    target = Console(file=out, width=100, height=24, force_terminal=True, color_system=None)
    target.print(render(status, live=True))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 23
    assert "waits for the trainer" in lines[-1]
    rows = [line for line in lines if line.startswith("e") and not line.startswith("env")]
    assert f"and {40 - len(rows)} more" in out.getvalue()
    target, out = console(terminal=True)
    target.print(render(status))
    assert len(out.getvalue().splitlines()) > 40


def test_many_troubles_of_one_kind_are_counted() -> None:
    """So that a cluster that is away does not push everything else out of sight."""
    lost = [EndpointStatus(f"http://{n}/v1", False, 0, 1, "HTTP 503") for n in range(64)]
    out = shown(sample_status(endpoints=lost))
    assert out.count("inference server http://") == 4
    assert "and 60 more like this" in out
    assert "0/64 engines" in out


FULL: dict[str, Any] = {
    "envs": {
        name: env_status(rewards=[n / 60 for n in range(60)], completed=1234567, failed=76543)
        for name in ("math", "a-name-that-is-rather-long")
    },
    "evals": [
        evaluation(env, step, step / 20)
        for step in (0, 10)
        for env in ("math", "code-with-a-long-name", "chat")
    ],
    "queued_sequences": 168,
    "reports": {
        name: ReportStatus(step=4, value=0.123456, low=0.0, median=0.0, high=1.0, recent=[])
        for name in ("loss", "logprob_mismatch", "entropy")
    },
}


@pytest.mark.parametrize("width", [50, 80, 120])
def test_everything_together_fits(width: int) -> None:
    """No line is too long and no number is cut, whatever there is to show."""
    out = shown(sample_status(**FULL), width)
    assert all(len(line) <= width for line in out.splitlines())
    for whole in (
        "queued 168 (5.2 batches)",
        "left 13 min",
        "math avg@4 0.500 +0.500 (step 10)",
        "loss 0.1235",
        "1/1 engines, 2/4 servers",
    ):
        assert whole in out


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colours_it_says_the_same(variables: dict[str, str]) -> None:
    """NO_COLOR and a dumb terminal get no colours."""
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True, _environ=variables).print(render(sample_status(**FULL)))
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", out.getvalue())
    assert "step 5/20" in re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def test_the_display_shows_every_env_against_its_target() -> None:
    """Each env has its own line with reward, mix and target."""
    status = sample_status(envs={"math": env_status(), "code": env_status(target=0.6, reward=None)})
    lines = {line.split()[0]: line.split() for line in shown(status).splitlines() if line.strip()}
    assert lines["math"][1:5] == ["0.750", "41.2%", "39.1%", "40.0%"]
    assert lines["code"][1] == "–"
    assert lines["code"][4] == "60.0%"


MATH = {"gsm": env_status(target=0.3, actual=0.25), "aime": env_status(target=0.1, actual=0.05)}
CODE = {"code": env_status(domain="code", target=0.6, actual=0.7)}


def test_envs_stand_below_their_domain() -> None:
    """Where there are several domains and one has several envs; an env alone in its domain is its own line."""
    lines = [line.split() for line in shown(sample_status(envs=MATH | CODE)).splitlines() if line.strip()]
    names = [line[0] for line in lines]
    assert names[names.index("env") + 1 : -1] == ["math", "gsm", "aime", "code"]
    assert lines[names.index("math")][3:5] == ["30.0%", "40.0%"]


@pytest.mark.parametrize("envs", [MATH, CODE | {"reverse": env_status(domain="reverse")}])
def test_domains_that_say_nothing_new_are_not_shown(envs: dict[str, Any]) -> None:
    """A single domain, or one for each env, is what the lines of the envs say already."""
    lines = [line.split() for line in shown(sample_status(envs=envs)).splitlines() if line.strip()]
    assert [line[0] for line in lines][-1 - len(envs) : -1] == list(envs)


def test_what_the_trainer_reports_is_shown_with_the_mismatch_first() -> None:
    """As many as there is room for; a mismatch that is unusual is a line of its own."""
    reports = {
        name: ReportStatus(step=4, value=value, low=0.0, median=0.0, high=1.0, recent=[])
        for name, value in {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "logprob_mismatch": 0.0123}.items()
    }
    out = shown(sample_status(reports=reports, mismatch="logprob_mismatch is 4.9 at step 3"), 120)
    assert "logprob_mismatch 0.0123" in out
    assert "c 3" in out
    assert "d 4" not in out
    assert "logprob_mismatch is 4.9 at step 3" in out


@pytest.mark.parametrize("width", [50, 80, 120])
def test_numbers_are_never_cut(width: int) -> None:
    """A narrow terminal shows fewer columns and shorter names; what it shows is whole, and no line is too long."""
    env = env_status(completed=1234567, dispatched=2345678, failed=1111099)
    out = shown(sample_status(envs={"an-environment-with-a-name-that-is-long": env}), width)
    lines = out.splitlines()
    (row,) = [line for line in lines if line.startswith("an-env")]
    whole = {"0.750", "41.2%", "39.1%", "40.0%", "12", "1234567", "1111099", "250ms"}
    cells = row.replace(" ms", "ms").split()[1:]
    assert {"0.750", "41.2%", "40.0%"} <= set(cells) <= whole
    assert len(cells) == {50: 3, 80: 6, 120: 8}[width]
    assert all(len(line.rstrip()) <= width for line in lines)
    for fact in ("step 5/20", "in flight 12/64", "rollouts/s 37", "queued 8/32"):
        assert any(fact in line for line in lines)


def test_the_display_says_what_is_waited_for() -> None:
    """A run that stands still tells why."""
    assert "waits for the trainer" in shown(sample_status(waiting_for="the trainer"))
    assert "waits" not in shown(sample_status(waiting_for=""))


def test_the_display_says_what_is_not_as_it_was_asked_for() -> None:
    """A waived minimum, an inference server that is out of service and a refused version, a line each."""
    assert "missing" not in shown(sample_status())
    out = shown(
        sample_status(
            envs={"math": env_status(minimum_waived="it has no ready server")},
            endpoints=[
                EndpointStatus("http://a/v1", healthy=True, inflight=1, version=4, error="slow once"),
                EndpointStatus("http://b/v1", healthy=False, inflight=0, version=3, error="HTTP 503"),
            ],
            refused="version 5 could not be loaded: no file",
        )
    )
    assert 'env "math" is missing from batches: it has no ready server' in out
    assert "inference server http://b/v1: HTTP 503" in out
    assert "http://a/v1" not in out
    assert "version 5 could not be loaded: no file" in out


def test_a_run_without_an_end_has_no_bar() -> None:
    """Without max_steps only the step is known."""
    assert "step 5 " in shown(sample_status(max_steps=None))


def test_names_are_no_markup() -> None:
    """An env name with brackets is shown as it is."""
    assert "[bold]odd[/bold]" in shown(sample_status(envs={"[bold]odd[/bold]": env_status()}))


HOSTILE = "math\x1b[2J\x1b]0;title\x07\r\x9b1m\u202e\n"


def test_text_from_elsewhere_cannot_steer_the_terminal() -> None:
    """Control characters in names and reasons are shown as marks, in the display and in the summary."""
    out = shown(sample_status(envs={HOSTILE: env_status()}, waiting_for=HOSTILE))
    target, written = console()
    share = {"first_reward": None, "last_reward": None, "sequences": 0}
    env = {**share, "actual_share": 0.0, "target_share": 1.0}
    totals = {"steps": 0, "wall_time_s": 1.0, "outcomes": {HOSTILE: 1}}
    print_summary({"end": HOSTILE, "envs": {HOSTILE: env}, "run_dir": HOSTILE, **share, **totals}, target)
    for text in (out, written.getvalue()):
        assert not set("\x1b\x07\r\x9b\u202e") & set(text)
        assert "math�[2J�]0;title�" in text


async def test_the_live_display_ends_with_the_last_picture() -> None:
    """When the run ends, what stays on the screen is its final state."""
    now = {"step": 1}
    asked = asyncio.Event()

    def status() -> Any:
        asked.set()
        return sample_status(step=now["step"])

    target, out = console(terminal=True)
    task = asyncio.create_task(show_progress(status, target))
    await asked.wait()
    now["step"] = 20
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "step 20/20" in out.getvalue()


SUMMARY: dict[str, Any] = {
    "end": "max_steps reached",
    "run_dir": "runs/quickstart",
    "steps": 60,
    "sequences": 7680,
    "first_reward": 0.01,
    "last_reward": 0.97,
    "envs": {
        "reverse": {
            "first_reward": 0.0,
            "last_reward": 0.992,
            "target_share": 0.4,
            "actual_share": 0.397,
            "sequences": 3048,
        },
        "[idle]": {
            "first_reward": None,
            "last_reward": None,
            "target_share": 0.6,
            "actual_share": 0.0,
            "sequences": 0,
        },
    },
    "outcomes": {"completed": 7680, "timed_out": 2, "lost": 0},
    "wall_time_s": 21.44,
}


def test_the_summary_is_readable() -> None:
    """Why it ended, first and last rewards, the mix against its target, what became of the rollouts, where it is."""
    target, out = console()
    print_summary(SUMMARY, target)
    lines = [line.split() for line in out.getvalue().splitlines() if line.strip()]
    assert lines[0] == ["max_steps", "reached"]
    assert lines[2] == ["reverse", "0.000", "0.992", "39.7%", "40.0%", "3048"]
    assert lines[3] == ["[idle]", "–", "–", "0.0%", "60.0%", "0"]
    assert lines[4] == ["all", "0.010", "0.970", "7680"]
    assert "60 steps in 21.4 s; rollouts: 7680 completed, 2 timed out" in out.getvalue()
    assert "run directory: runs/quickstart" in out.getvalue()


def test_the_summary_has_the_evaluations() -> None:
    """First and last score of each, with the change between them."""
    target, out = console(50)
    print_summary({**SUMMARY, "evals": [evaluation("math", 0, 0.25), evaluation("math", 60, 0.75)]}, target)
    lines = [line.split() for line in out.getvalue().splitlines() if line.strip()]
    assert ["math", "avg@4", "0.250", "0.750", "+0.500", "60"] in lines


def test_the_summary_fits_a_narrow_terminal() -> None:
    """Headings go to a second line before a word or a number of theirs is cut."""
    target, out = console(50)
    print_summary(SUMMARY, target)
    assert "…" not in out.getvalue()
    assert "sequences" in out.getvalue()


def test_the_display_tells_what_a_failing_env_raised() -> None:
    """While it matters: an env of which hardly a rollout fails needs no line."""
    said = "KeyError: 'missing', at mine.py:15 in rollout"
    failing = env_status(dispatched=16, completed=0, inflight=0, failed=16, failure=said)
    assert f'env "math": 16 of 16 rollouts did not end well, the last: {said}' in shown(
        sample_status(envs={"math": failing})
    )
    well = env_status(dispatched=1000, completed=990, inflight=0, failed=10, failure=said)
    assert said not in shown(sample_status(envs={"math": well}))


def test_what_was_changed_by_hand_is_one_line() -> None:
    """All differences from the configuration, and no line without any."""
    changes = [
        "ratio of env math: 0.5 -> 0.4 (since noon, by me)",
        "max_inflight: 64 -> 32 (since noon, by me)",
    ]
    lines = shown(sample_status(changes=changes), width=200).splitlines()
    assert [line.strip() for line in lines if "changed by hand" in line] == [
        f"changed by hand: {'; '.join(changes)}"
    ]
    assert "changed by hand" not in shown(sample_status())
