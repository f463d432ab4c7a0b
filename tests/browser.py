"""A real browser under the tests' control: Chromium over its debugging protocol, nothing between."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--window-size=1400,1000",
         "--remote-debugging-port=0", "--no-proxy-server"]  # fmt: skip


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._numbers = socket, itertools.count(1)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def open(self, url: str) -> None:
        self.call("Page.enable")
        self.call("Page.navigate", url=url)

    def js(self, code: str) -> Any:
        """What an expression is on the page."""
        answer = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{code}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, code: str, deadline_s: float = 30) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + deadline_s
        while not (value := self.js(code)):
            assert time.monotonic() < deadline, f"{code}\n{self.js('document.body.innerText')}"
            time.sleep(0.2)
        return value

    def text(self) -> str:
        return str(self.js("document.body.innerText"))

    def click(self, element: str) -> None:
        """An element, by an expression."""
        assert self.js(f"(e => e ? (e.click(), true) : false)({element})"), element

    def fill(self, field: str, text: str) -> None:
        """A field, by an expression: what stands in it is replaced, as by keys."""
        self.js(f"(e => {{ e.focus(); e.select(); }})({field})")
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A tab of a fresh profile."""
    profile = folder / "browser"
    process = subprocess.Popen(
        [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port_file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not port_file.exists() or not port_file.read_text().strip():
            assert time.monotonic() < deadline and process.poll() is None, "the browser did not start"
            time.sleep(0.1)
        port = port_file.read_text().splitlines()[0]
        tabs = httpx.get(f"http://127.0.0.1:{port}/json", trust_env=False).json()
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        with connect(address, max_size=None, proxy=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(30)
