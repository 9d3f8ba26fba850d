"""A real browser for tests: Debian's chromium without a window, spoken to over its DevTools socket.

`Browser.start` is one process with a profile of its own; `tab` opens a page in it. A tab collects everything that went
wrong in its page: errors on the console, exceptions, and what the page's policy refused.
"""

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Browser:
    """One browser process; answers are told from events by their numbers."""

    def __init__(self, process: asyncio.subprocess.Process, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._process = process
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}

    @classmethod
    @asynccontextmanager
    async def start(cls, profile: Path) -> AsyncIterator[Self]:
        """Until the block is left."""
        assert PROGRAM is not None
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *_FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            while b"DevTools listening on" not in (line := await process.stderr.readline()):
                assert line, "chromium ended before it listened"
            address = line.decode().rpartition(" ")[2].strip()
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(address, max_msg_size=0) as socket,
                asyncio.TaskGroup() as group,
            ):
                browser = cls(process, socket)
                # Its log must not fill the pipe.
                reading = [group.create_task(browser._receive()), group.create_task(process.stderr.read())]
                yield browser
                for task in reading:
                    task.cancel()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    @asynccontextmanager
    async def tab(self, *, width: int = 1280, dark: bool = False) -> AsyncIterator["Tab"]:
        """A page with storage of its own."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        await tab.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await tab.call("Emulation.setEmulatedMedia", features=[scheme])
        try:
            yield tab
        finally:
            await self.call("Target.disposeBrowserContext", browserContextId=context)

    async def call(self, method: str, *, session: str = "", **arguments: Any) -> dict[str, Any]:
        """Ask the browser, or a tab of it."""
        self._number += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        message = {"id": self._number, "method": method, "params": arguments}
        await self._socket.send_str(json.dumps({**message, **({"sessionId": session} if session else {})}))
        return await answer

    async def _receive(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if "error" in told:
                    answer.set_exception(AssertionError(told["error"]["message"]))
                else:
                    answer.set_result(told["result"])
            elif (tab := self._tabs.get(told.get("sessionId", ""))) is not None:
                tab.notice(told["method"], told["params"])


class Tab:
    """One page; `errors` is what went wrong in it."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return await self._browser.call(method, session=self._session, **arguments)

    def notice(self, method: str, told: dict[str, Any]) -> None:
        """Take an event of the browser."""
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(str([argument.get("value") for argument in told["args"]]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    async def open(self, url: str) -> None:
        found = await self.call("Page.navigate", url=url)
        assert "errorText" not in found, found["errorText"]

    async def js(self, expression: str) -> Any:
        """The value of an expression in the page; its error is raised here."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The value of an expression once it is true; the test's time limit bounds the wait."""
        while True:
            with suppress(AssertionError):  # the page may be about to be another one
                if value := await self.js(expression):
                    return value
            await asyncio.sleep(0.05)

    async def until_text(self, text: str, where: str = "body") -> None:
        """Wait until a place of the page says something."""
        await self.until(
            f"document.querySelector({json.dumps(where)})?.innerText.includes({json.dumps(text)})"
        )

    async def click(self, text: str, what: str = "button") -> None:
        """Click the first visible element of a kind that says something."""
        await self.until(
            f"(() => {{ const found = [...document.querySelectorAll({json.dumps(what)})]"
            f".find((node) => node.checkVisibility() && node.innerText.trim().includes({json.dumps(text)}));"
            " if (found) found.click(); return Boolean(found); })()"
        )

    async def key(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_CODES[key]
            )

    async def resize(self, width: int, height: int = 900) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    async def is_cut(self) -> bool:
        """Whether the page is wider than what shows it."""
        root = "document.documentElement"
        return bool(await self.js(f"{root}.scrollWidth > {root}.clientWidth"))

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))  # noqa: ASYNC240  a test's own small file


_CODES = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}
