"""A real browser for tests: headless Chromium, driven over its DevTools protocol.

Where the machine has no Chromium (Debian: `apt-get install chromium`), the tests that need one are skipped.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--force-color-profile=srgb"),
)
_START_S = 30.0


class Page:
    """One tab. What it logs and asks for is collected from its start."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.errors: list[str] = []
        """Exceptions, console errors, and what the content security policy refused."""
        self.requests: list[str] = []
        """URLs that were asked for, the page's own included."""

    async def listen(self) -> None:
        """Takes the browser's messages until it closes."""
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._calls.pop(found["id"]).set_result(found)
            else:
                self._note(found["method"], found["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.errors.append(str([argument.get("value") for argument in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One call of the protocol."""
        number = max(self._calls, default=0) + 1 + len(self._calls)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(future, 60)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    async def open(self, url: str) -> None:
        """Load a page and wait until it is drawn."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), 60)

    async def run(self, code: str) -> Any:
        """The value of an expression; a promise is awaited."""
        given = await self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in given:
            raise RuntimeError(given["exceptionDetails"].get("exception", {}).get("description", code))
        return given["result"].get("value")

    async def click(self, selector: str) -> None:
        """Click the middle of the first element, as a mouse does."""
        box = await self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            "node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
        await self.settle()

    async def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        await self.run("new Promise(done => setTimeout(() => requestAnimationFrame(() => done(1)), 250))")

    async def theme(self, name: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        await self.settle()

    async def screenshot(self, file: Path, selector: str | None = None, height: int = 900) -> None:
        """What the window shows, or `height` pixels of the page from the top of an element."""
        clip: dict[str, Any] = {}
        if selector is not None:
            top = await self.run(
                f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().top + window.scrollY - 6"
            )
            clip = {"clip": {"x": 0, "y": top, "width": 1280, "height": height, "scale": 1}}
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=bool(clip), **clip)
        file.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser_page(width: int = 1280, height: int = 900) -> AsyncIterator[Page]:
    """A tab of a separate browser."""
    if CHROMIUM is None:
        raise RuntimeError("no chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    targets = [one for one in await answer.json(content_type=None) if one["type"] == "page"]
                async with session.ws_connect(targets[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    listener = asyncio.create_task(page.listen())
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                    await page.call("Emulation.setDeviceMetricsOverride", **size)
                    try:
                        yield page
                    finally:
                        listener.cancel()
        finally:
            process.kill()
            process.wait(30)


async def _port(file: Path) -> int:
    """Waits for the file in which the browser names its port."""
    async with asyncio.timeout(_START_S):
        while not (file.is_file() and (lines := file.read_text().splitlines())):
            await asyncio.sleep(0.05)
    return int(lines[0])
