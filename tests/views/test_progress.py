"""What a person sees: the live display and the closing summary."""

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from orchestrator.facts import EndpointStatus, ReportStatus
from orchestrator.views.progress import print_summary, render, show_progress
from tests.support.sample_status import env_status, sample_status


def console(width: int = 120, *, terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=terminal, color_system=None), out


def shown(status: Any, width: int = 120) -> str:
    target, out = console(width)
    target.print(render(status))
    return out.getvalue()


def test_the_display_shows_the_run() -> None:
    """Step, reward, version, in flight, rate and queue are on the first line."""
    first = " ".join(shown(sample_status()).splitlines()[0].split())
    assert first == "step 5/20 reward 0.750 version 4 in flight 12/64 rollouts/s 37 queued 8/32 62 s"


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
