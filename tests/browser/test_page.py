"""The page in a real browser: live values, rollouts that are found and read, the ways it is fed, and what it withstands."""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from orchestrator.cli.view import build_report
from orchestrator.service.page import RunDirectory
from orchestrator.views.http import build_app, serve_http
from tests.browser.chromium import PROGRAM, Browser, Tab
from tests.integration.env_servers import ROOT
from tests.integration.service_fixture import Command
from tests.support.env_specs import kept_by
from tests.support.recorded_run import HOSTILE, write_journal, write_run
from tests.support.step_records import step_record

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        PROGRAM is None, reason="there is no chromium here; install it with the system's packages"
    ),
]

OPEN_ONE = (
    "(() => { const row = [...document.querySelectorAll('#rollouts tbody tr')]"
    ".find((row) => row.innerText.includes('kept')); row?.click(); return Boolean(row); })()"
)
"""Opens the newest group whose conversation was kept."""


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with Browser.start(tmp_path / "profile") as browser:
        yield browser


@asynccontextmanager
async def viewing(run_dir: Path, *, port: int = 0, token: str | None = None) -> AsyncIterator[str]:
    """What `orchestrator view` serves, in this process; yields the address."""
    run = RunDirectory(run_dir)
    app = build_app(status=run.status, metrics=bytes, token=token)
    feed = run.feed()
    feed.add_to(app)
    async with serve_http(app, host="127.0.0.1", port=port) as address:
        try:
            yield address
        finally:
            feed.close()


@asynccontextmanager
async def quickstart(tmp_path: Path, *options: str) -> AsyncIterator[tuple[Command, str]]:
    """The quickstart as a user runs it, for so many steps that it outlives the test; yields its page's address."""
    run_dir = tmp_path / "quickstart"
    command = await Command.start(
        "run",
        ROOT / "configs" / "quickstart.toml",
        *("--run_dir", str(run_dir), "--max_steps", "100000", "--log.format", "json", *options),
        logs=tmp_path / "logs",
    )
    async with command:
        started = await command.wait_event("run.started")
        yield command, started["http"]


def env_servers(command: Command) -> list[int]:
    """The processes that serve envs, without those that only watch over one."""
    found = []
    for started in command.events("env.server_started"):
        with suppress(OSError):
            found.append(kept_by(started["pid"]))
    return found


async def sees_no_trouble(tab: Tab) -> None:
    assert tab.errors == []
    assert not await tab.is_cut()


async def test_a_live_run_is_watched_and_its_rollouts_are_read(browser: Browser, tmp_path: Path) -> None:
    """Values arrive by themselves, curves are drawn, a rollout is found and read, and a killed env server shows."""
    async with quickstart(tmp_path) as (command, address), browser.tab() as tab:
        await tab.open(address)
        await tab.until_text("running", "#state")
        step = "Number(document.querySelector('.facts dd')?.firstChild.data)"
        first = await tab.until(f"{step} > 1 && {step}")
        await tab.until(f"{step} > {first}")
        await tab.until("document.querySelectorAll('.chart .curve').length > 10")
        for env in ("reverse", "agree", "lookup"):
            await tab.until_text(env, "#overview table")
        await tab.click("Rollouts")
        await tab.until("document.querySelectorAll('#rollouts tbody tr').length > 5")
        await tab.until(OPEN_ONE)
        await tab.until("document.querySelectorAll('.said pre').length > 1")
        await tab.until_text("reward", ".detail .member")
        await sees_no_trouble(tab)
        await tab.click("Overview")
        await pauses_and_resumes(tab, tmp_path / "quickstart")
        killed = time.monotonic()
        os.kill(env_servers(command)[0], signal.SIGKILL)
        await tab.until(
            "/has 0 of 1 servers/.test(document.querySelector('#notices').innerText)"
            " || [...document.querySelectorAll('#overview tbody td')].some((cell) => cell.innerText === '0/1')"
            " || document.querySelector('#overview tbody td.restarts .warn') !== null"
        )
        print(f"a killed env server showed after {time.monotonic() - killed:.1f} s")  # noqa: T201
        await sees_no_trouble(tab)


async def pauses_and_resumes(tab: Tab, run_dir: Path) -> None:
    """The token is asked for once, for both."""
    await tab.click("Pause")
    await tab.until("document.querySelector('#ask').open")
    token = (run_dir / "control.token").read_text(encoding="utf-8").strip()
    await tab.js(f"document.querySelector('#token').value = {token!r}")
    await tab.click("Go on")
    await tab.until_text("Resume", "#controls")
    await tab.until_text("paused", "#notices")
    await tab.click("Resume")
    await tab.until_text("Pause", "#controls")
    assert not await tab.js("document.querySelector('#ask').open")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
async def test_nothing_is_cut(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    """Neither on a phone nor on a desk, on both tabs, with a conversation open; tables scroll inside their boxes."""
    async with viewing(write_run(tmp_path / "run")) as address, browser.tab(width=width, dark=dark) as tab:
        await tab.open(address)
        await tab.until("document.querySelectorAll('.chart .curve').length > 10")
        await tab.until_text("Tasks by solve rate", "#overview")
        await tab.until_text("solved least", "#overview")
        await tab.until_text("60 of 1000 tried; difficulty: unseen 940, easy 10, medium 15", "#overview")
        await sees_no_trouble(tab)
        await tab.click("Rollouts")
        await tab.until("document.querySelectorAll('#rollouts tbody tr').length > 5")
        await tab.until(OPEN_ONE)
        await tab.until("document.querySelectorAll('.said pre').length > 1")
        await sees_no_trouble(tab)
        for folder in filter(None, [os.environ.get("SCREENSHOTS")]):
            await tab.screenshot(Path(folder) / f"rollouts-{width}-{'dark' if dark else 'light'}.png")


@pytest.mark.parametrize("width", [390, 1280])
async def test_an_env_with_a_long_name_can_be_told_from_others(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    """Its cell ends where it ends, and shows the beginning of the name; the whole of it is what the button says when pointed at."""
    name = "package_of_environments.mathematics.grade_school:GradeSchool"
    run_dir = tmp_path / "run"
    write_journal(run_dir, [step_record(step, envs=(name, "code")) for step in range(1, 4)])
    async with viewing(run_dir) as address, browser.tab(width=width) as tab:
        await tab.open(address)
        button = f"document.querySelector('td.name button[data-key=\"{name}\"]')"
        await tab.until(f"Boolean({button})")
        assert name in await tab.js(f"{button}.title")
        edges = "(() => {{ const cell = {0}.closest('td').getBoundingClientRect(), own = {0}.getBoundingClientRect(); return own.right <= cell.right; }})()"
        assert await tab.js(edges.format(button))


async def test_the_theme_is_chosen_and_remembered(browser: Browser, tmp_path: Path) -> None:
    """The system's by default; the switch wins, also after the page was loaded again."""
    background = "getComputedStyle(document.body).backgroundColor"
    async with viewing(write_run(tmp_path / "run")) as address, browser.tab(dark=True) as tab:
        await tab.open(address)
        await tab.until_text("ended", "#state")
        dark = await tab.js(background)
        await tab.click("theme")
        light = await tab.js(background)
        assert light != dark
        await tab.open(address + "/?again")
        await tab.until_text("ended", "#state")
        assert await tab.js(background) == light


async def test_what_a_rollout_says_is_shown_and_never_run(browser: Browser, tmp_path: Path) -> None:
    """Markup in a conversation is text on the served page and in a report, whatever it is."""
    run_dir = write_run(tmp_path / "run")
    report = tmp_path / "report.html"
    report.write_bytes(build_report([run_dir]))
    async with viewing(run_dir) as address, browser.tab() as tab:
        for place in (address, report.as_uri()):
            await tab.open(f"{place}#rollouts?env=math&step=3")
            await tab.until("document.querySelectorAll('#rollouts tbody tr').length === 1")
            await tab.until(OPEN_ONE)
            await tab.until_text(f"question of step 3 {HOSTILE}", ".detail")
            assert "taken" not in await tab.js("document.title")
            assert await tab.js("document.querySelectorAll('main b, main img').length") == await tab.js(
                "document.querySelectorAll('main .legend b, main .pairs b, main .rewards b').length"
            )
            await sees_no_trouble(tab)


async def test_rollouts_are_filtered_compared_and_followed(browser: Browser, tmp_path: Path) -> None:
    """A text is searched for, members stand side by side, and a task is followed over versions."""
    async with viewing(write_run(tmp_path / "run")) as address, browser.tab() as tab:
        await tab.open(f"{address}#rollouts")
        await tab.until("document.querySelectorAll('#rollouts tbody tr').length > 5")
        await tab.js("document.querySelector('#filter-contains').value = 'question of step 1 <'")
        await tab.click("Find")
        await tab.until("document.querySelectorAll('#rollouts tbody tr').length === 1")
        await tab.js("document.querySelector('#rollouts tbody button').click()")
        await tab.until("document.querySelectorAll('.member').length === 2")
        await tab.click("all", ".detail button")
        await tab.until("document.querySelectorAll('.member').length === 3")
        await tab.click("Follow this task")
        await tab.until("document.querySelectorAll('#rollouts tbody tr').length > 1")
        await tab.until_text("This task over versions", "#rollouts")
        await tab.js("document.querySelector('#filter-step').value = 'soon'")
        await tab.click("Find")
        await tab.until_text("is not a whole number", "#rollouts")
        tab.errors = [error for error in tab.errors if "400" not in error]
        await sees_no_trouble(tab)


async def test_a_page_says_that_it_is_cut_off_and_catches_up(browser: Browser, tmp_path: Path) -> None:
    """The last values stay; when the service is back, so is the page, without being loaded again."""
    run_dir = write_run(tmp_path / "run")
    async with browser.tab() as tab:
        async with viewing(run_dir) as address:
            await tab.open(address)
            await tab.until("document.querySelectorAll('.chart .curve').length > 10")
            await tab.js("window.loaded = 'once'")
        await tab.until_text("connection lost", "#connection")
        assert await tab.js("document.querySelectorAll('.chart .curve').length") > 10
        async with viewing(run_dir, port=int(address.rpartition(":")[2])):
            await tab.until("document.querySelector('#connection').innerText === ''")
            assert await tab.js("window.loaded") == "once"


async def test_the_token_is_asked_for_once(browser: Browser, tmp_path: Path) -> None:
    """A wrong one is asked for again; the right one is kept for this tab alone."""
    async with viewing(write_run(tmp_path / "run"), token="open-sesame") as address, browser.tab() as tab:
        await tab.open(address)
        for token in ("wrong", "open-sesame"):
            await tab.until("document.querySelector('#ask').open")
            assert "ended" not in await tab.js("document.body.innerText")
            await tab.js(f"document.querySelector('#token').value = '{token}'")
            await tab.click("Go on")
        await tab.until_text("ended", "#state")
        await tab.open(address + "/?again")
        await tab.until_text("ended", "#state")
        assert "open-sesame" not in await tab.js("document.documentElement.outerHTML + location.href")


async def test_the_page_is_used_with_a_keyboard(browser: Browser, tmp_path: Path) -> None:
    """Tabs move with arrows, a chart's cursor too, and focus can be seen."""
    async with viewing(write_run(tmp_path / "run")) as address, browser.tab() as tab:
        await tab.open(address)
        await tab.until("document.querySelectorAll('.chart .curve').length > 10")
        await tab.js("document.querySelector('.chart svg').focus()")
        for _ in range(3):
            await tab.key("ArrowLeft")
        await tab.until_text("step 9", ".chart .where")
        await tab.key("Enter")
        await tab.until("location.hash === '#rollouts?step=9'")
        await tab.js("document.querySelector('#tab-rollouts').focus()")
        await tab.key("ArrowLeft")
        await tab.until(
            "!document.querySelector('#overview').hidden && document.activeElement.id === 'tab-overview'"
        )
        await tab.key("Tab")
        assert await tab.js("getComputedStyle(document.activeElement).outlineStyle") != "none"


async def test_a_report_of_several_runs_opens_from_disk_without_a_network(
    browser: Browser, tmp_path: Path
) -> None:
    """One file: curves of both runs in the same charts, a line for each in the table, rollouts of both."""
    runs = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    report = tmp_path / "report.html"
    report.write_bytes(build_report(runs))
    async with browser.tab() as tab:
        await tab.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        await tab.open(report.as_uri())
        await tab.until("document.querySelectorAll('#overview tbody tr').length === 2")
        legend = await tab.js("document.querySelector('.chart .legend').innerText")
        assert re.sub(r"[\d.\s]+", " ", legend).split() == ["one", "two"]
        await tab.click("Rollouts")
        await tab.js(
            "(() => { const run = document.querySelector('#filter-run'); run.value = '1'; run.dispatchEvent(new Event('change')); })()"
        )
        await tab.until("document.querySelectorAll('#rollouts tbody tr').length > 5")
        await tab.until(OPEN_ONE)
        await tab.until("document.querySelectorAll('.said pre').length > 1")
        await sees_no_trouble(tab)
        assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
        await asyncio.sleep(0)
