"""Drives headless Chromium through its DevTools protocol, over pipes: no library, no port."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
SECONDS = 60.0


class Page:
    """One page, with what it logged and asked for."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies, self._buffer = commands, replies, b""
        self._numbers, self._session = itertools.count(1), ""
        self.problems: list[str] = []
        """Errors and warnings of the console, exceptions, dialogs."""
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]
            self._note(reply.get("method"), reply.get("params", {}))

    def _receive(self) -> Any:
        while b"\0" not in self._buffer:
            data = os.read(self._replies, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, method: str | None, parameters: Any) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.problems.append(str([each.get("value") for each in parameters["args"]]))
        elif method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
            self.problems.append(json.dumps(parameters))

    def open(self, path: Path, width: int, *, dark: bool) -> None:
        """Load a file and wait until its charts are drawn."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.scheme(dark=dark)
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("[...document.querySelectorAll('figure')].every((figure) => figure.querySelector('canvas'))")
        self.wait_for("document.querySelectorAll('figure').length > 3")

    def scheme(self, *, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def run(self, expression: str) -> Any:
        """The value of an expression."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_for(self, condition: str) -> None:
        end = time.monotonic() + SECONDS
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"not so after {SECONDS} s: {condition}; {self.problems}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        x, y = self.run(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)}); found.scrollIntoView();"
            "const box = found.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Replace what a field holds."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a list."""
        self.run(
            f"(() => {{ const list = document.querySelector({json.dumps(selector)}); list.value = {json.dumps(value)};"
            "list.dispatchEvent(new Event('change')); })()"
        )

    def screenshot(self, path: Path) -> None:
        width, height = self.run("[innerWidth, Math.min(document.documentElement.scrollHeight, 3000)]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a new browser, whose profile is in `folder`."""
    command_end, commands = os.pipe()
    replies, reply_end = os.pipe()
    words = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe", "about:blank"]
    script = f'exec "$@" 3<&{command_end} 4>&{reply_end}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *words], pass_fds=(command_end, reply_end), stderr=subprocess.DEVNULL
    )
    os.close(command_end)
    os.close(reply_end)
    try:
        yield Page(commands, replies)
    finally:
        with suppress(OSError):
            os.close(commands)  # which ends the browser
        os.close(replies)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
