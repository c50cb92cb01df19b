"""Headless Chromium, driven by its DevTools protocol over a pipe: no driver, no library."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.commands import PATIENCE
from tests.optional import program

CHROMIUM = program("chromium")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    # No other host than this one can be reached.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


class Chromium:
    """A browser with one page."""

    def __init__(self, profile: Path) -> None:
        """Starts the browser.

        Args:
            profile: A new folder, which it may use.
        """
        assert CHROMIUM is not None
        # It reads commands from descriptor 3 and writes messages to 4, each ended by a zero byte.
        command, self._commands = os.pipe()
        self._messages, message = os.pipe()
        redirected = f'exec "$@" 3<&{command} 4>&{message}'
        options = [*OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, "chromium", CHROMIUM, *options],
            pass_fds=(command, message),
            stderr=subprocess.DEVNULL,
        )
        os.close(command)
        os.close(message)
        self._buffer, self._calls, self.errors = b"", 0, list[str]()
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        (target,) = [each["targetId"] for each in targets if each["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._calls += 1
        record: dict[str, Any] = {"id": self._calls, "method": method, "params": params}
        if self._session is not None:
            record["sessionId"] = self._session
        os.write(self._commands, json.dumps(record).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            if message.get("id") == self._calls:
                assert "error" not in message, (method, message)
                found: dict[str, Any] = message["result"]
                return found

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._messages, 1 << 16)
            assert more, "Chromium ended"
            self._buffer += more
        first, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression on the page, awaited."""
        options = {"awaitPromise": True, "returnByValue": True}
        found = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Waits until an expression on the page is true."""
        deadline = time.monotonic() + PATIENCE
        while self.evaluate(condition) is not True:
            assert time.monotonic() < deadline, self.evaluate("document.body.innerText")
            time.sleep(0.1)

    def open(self, url: str) -> None:
        """Opens a page of a site, and waits until its model is ready."""
        self.call("Page.navigate", url=url)
        self.until("document.body?.dataset.state === 'ready'")

    def answer(self, text: str) -> str:
        """Types a text, runs the model, and returns the page's answer."""
        typed = f"document.getElementById('input').value = {json.dumps(text)}"
        self.evaluate(f"{typed}; document.getElementById('go').click()")
        self.until("document.body.dataset.state === 'ready'")
        found: str = self.evaluate("document.getElementById('output').textContent")
        return found

    def status(self) -> str:
        """Returns the status line of the page."""
        found: str = self.evaluate("document.getElementById('status').textContent")
        return found

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        self._process.wait()
        os.close(self._commands)
        os.close(self._messages)


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on this machine; gives its address."""
    handler = partial(_Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()
