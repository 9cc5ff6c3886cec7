"""A run of the command line in a real Chromium: attached to the list by a click, while it runs."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from boards import recipe, wait
from browsers import IMAGES, axe, chromium, complaints, eventually, look, press, running, texts

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]


def test_a_run_that_was_started_without_the_board_is_shown_by_a_click(tmp_path: pathlib.Path):
    (tmp_path / "recipe.yaml").write_text(recipe("runs/mine", steps=100000, extra="checkpoint: {every: 20}\n"))
    command = [sys.executable, "-m", "meshtune", "train", "recipe.yaml"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=tmp_path, **quiet) as run, running(tmp_path) as board, chromium() as driver:
        try:
            wait(lambda: (tmp_path / "runs/mine/checkpoints/20").is_dir(), 120)
            driver.get(f"{board.address}/#/runs")
            eventually(lambda: texts(driver, ".empty"))
            press(driver, "Runs that were started without the board")
            press(driver, "Show here")
            eventually(lambda: "running" in "".join(texts(driver, ".head .state")))
            eventually(lambda: len(texts(driver, "figure")) >= 5)
            assert "stop it where it was started" in "".join(texts(driver, ".head"))
            assert "Stop and save" not in texts(driver, ".head button")
            assert not axe(driver)
            look(driver, 1280, 900, dark=False)
            driver.save_screenshot(str(IMAGES / "attached.png"))
        finally:
            run.terminate()
        eventually(lambda: "stopped" in "".join(texts(driver, ".head .state")))
        eventually(lambda: "Resume" in texts(driver, ".head button"))
        driver.get(f"{board.address}/#/runs")
        eventually(lambda: len(texts(driver, ".run")) == 1)
        assert not complaints(driver)
