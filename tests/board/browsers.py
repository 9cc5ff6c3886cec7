"""A real Chromium for the tests, and a board in a separate process. `make test-board` installs what they need."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from meshtune.board import queue
from meshtune.board.job import ACTIVE, read_jobs
from meshtune.board.workspace import workspace_at

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
IMAGES = pathlib.Path(os.environ.get("MESHTUNE_SCREENSHOTS", "/tmp/meshtune-screenshots"))
AXE = pathlib.Path(os.environ.get("MESHTUNE_AXE", "node_modules/axe-core/axe.min.js"))
# Tasks that keep the page from answering for 50 ms and more, from the first moment on.
LONG_TASKS = """
window.longTasks = [];
new PerformanceObserver((list) => window.longTasks.push(...list.getEntries().map((entry) => entry.duration)))
  .observe({type: 'longtask', buffered: true});
"""


@contextlib.contextmanager
def chromium(*, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """A browser without a window. Skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: make test-board")
    from selenium.webdriver.chrome.service import Service

    for program in (CHROMIUM, DRIVER):
        if not os.path.exists(program):
            pytest.skip(f"needs {program}: make test-board")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--lang=en", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        look(driver, width, height, dark=dark)
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": LONG_TASKS})
        yield driver
    finally:
        driver.quit()


def look(driver: Any, width: int, height: int, *, dark: bool) -> None:
    """The size of the screen in CSS pixels, and the theme of the system."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


class Board:
    """`meshtune board` over a root, which can be killed and started again at the same address."""

    def __init__(self, root: pathlib.Path, *options: str):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.root, self.options, self.address = root, options, f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        command = [sys.executable, "-m", "meshtune", "board", "--root", str(self.root), "--port", str(self.port)]
        self.process = subprocess.Popen([*command, *self.options], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("board")

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def running(root: pathlib.Path, *options: str) -> Iterator[Board]:
    """A board that is killed in the end, with all it has started: a test that fails leaves no run behind."""
    board = Board(root, *options)
    board.start()
    try:
        yield board
    finally:
        board.kill()
        workspace = workspace_at(root)
        for job in read_jobs(workspace.jobs):
            if job.state in ACTIVE or job.state == "queued":
                queue.stop(workspace, job.id, now=True)


def eventually(read: Any, seconds: float = 180.0) -> Any:
    """The first value of `read()` that is true; elements that the page has replaced meanwhile are looked for again."""
    from selenium.common.exceptions import WebDriverException

    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(WebDriverException):
            if value := read():
                return value
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def texts(driver: Any, selector: str) -> list[str]:
    """Returns the texts of a selector's elements."""
    return [element.text for element in driver.find_elements("css selector", selector)]


def press(driver: Any, text: str) -> None:
    """Clicks the button that says `text`, once it is there."""

    def click() -> bool:
        for button in driver.find_elements("css selector", "button, summary"):
            if button.is_displayed() and button.text == text:
                button.click()
                return True
        return False

    eventually(click)


def choose(driver: Any, field: str, value: str) -> None:
    """Chooses an option of a list, once it is there."""
    option = f"#{field} option[value='{value}']"
    eventually(lambda: driver.find_elements("css selector", option))[0].click()


def requests_of(driver: Any) -> list[str]:
    """The addresses that the page has asked for since this was last called."""
    import json

    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def complaints(driver: Any) -> list[str]:
    """Returns new lines of the browser's console since the last call, but for connections and requests that
    were refused or replaced."""
    expected = (
        "status of 400",
        "status of 401",
        "status of 409",  # a preview or a plan that a newer one has ended
        "ERR_CONNECTION_REFUSED",
        "ERR_INCOMPLETE_CHUNKED",
        "ERR_EMPTY_RESPONSE",
        "ERR_CONNECTION_RESET",
        "Password field is not contained in a form",  # the hub's token: no form, so that no browser offers to keep it
    )
    entries = [entry["message"] for entry in driver.get_log("browser")]
    return [entry for entry in entries if not any(name in entry for name in expected)]


def axe(driver) -> list[str]:
    """Returns the violations that axe-core finds on the page. Fails where the package is not installed: nothing would
    be proved."""
    if not AXE.exists():
        pytest.fail(f"axe-core is not at {AXE}: npm install --no-save axe-core (make test-board), or set MESHTUNE_AXE")
    driver.execute_script(AXE.read_text(encoding="utf-8"))
    result = driver.execute_async_script("axe.run().then(arguments[0])")
    return [f"{item['id']}: {node['html'][:120]}" for item in result["violations"] for node in item["nodes"]]
