"""Failures while somebody looks, in a real Chromium: the page reports them, and nothing that was written is lost."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import pytest
from boards import disk, fill, recipe, submit_job
from browsers import axe, chromium, complaints, eventually, press, running, texts

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]

ENDLESS = 200_000
BROKEN = b'{"kind": "train", "step": 3, "lo\n'
# Every process of the board goes by this clock, which jumps back by two hours once there is the file.
CLOCK = """
import os, time
_real = time.time
time.time = lambda: _real() - (7200 if os.path.exists(os.environ["JUMPED"]) else 0)
"""


def head(driver) -> str:
    return "".join(texts(driver, ".head"))


def state_of(driver) -> str:
    return "".join(texts(driver, ".head .state"))


def step_of(driver) -> int:
    shown = "".join(texts(driver, ".head .progress")).partition("update ")[2].partition(" ")[0]
    return int(shown.replace(",", "") or 0)


def steps(output: pathlib.Path) -> list[int]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines() if '"crc32"' in line]
    return [row["step"] for row in rows if row["kind"] == "train"]


def test_broken_lines_and_a_clock_that_jumps_back(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    clock, root = tmp_path / "clock", tmp_path / "root"
    clock.mkdir()
    root.mkdir()
    (clock / "sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("JUMPED", str(clock / "jumped"))
    monkeypatch.setenv("PYTHONPATH", f"{clock}:{os.environ.get('PYTHONPATH', '')}")
    metrics = root / "runs/first/metrics.jsonl"
    with running(root) as board, chromium() as driver:
        job = submit_job(board.address, {"recipe": recipe("runs/first", steps=ENDLESS)})
        driver.get(f"{board.address}/#/runs/{job}")
        eventually(lambda: step_of(driver) > 5)
        for count in ("1 line of the metrics is", "2 lines of the metrics are"):
            with metrics.open("ab") as file:
                file.write(BROKEN)
            eventually(lambda count=count: count in "".join(texts(driver, ".warning")))
        driver.refresh()
        eventually(lambda: "2 lines of the metrics are broken and left out" in "".join(texts(driver, ".warning")))

        # The clocks of the machine and of the browser, and what the files say of theirs.
        (clock / "jumped").touch()
        driver.execute_script("const real = Date.now; Date.now = () => real() - 7.2e6")
        os.utime(metrics, (1e9, 1e9))
        before = step_of(driver)
        eventually(lambda: step_of(driver) > before + 20)
        press(driver, "Stop and save")
        eventually(lambda: state_of(driver) == "stopped")
        shown = step_of(driver)
        assert f"after update {shown:,}" in "".join(texts(driver, "section .row"))
        assert steps(root / "runs/first") == list(range(1, shown + 1))
        assert "took -" not in head(driver)
        driver.refresh()
        eventually(lambda: step_of(driver) == shown and len(texts(driver, "figure")) >= 5)
        assert axe(driver) == []
        assert complaints(driver) == []


def test_the_folder_of_a_run_is_deleted_while_it_is_shown(tmp_path: pathlib.Path):
    with running(tmp_path) as board, chromium() as driver:
        job = submit_job(
            board.address, {"recipe": recipe("runs/gone", steps=ENDLESS, extra="checkpoint: {every: 400}\n")}
        )
        driver.get(f"{board.address}/#/runs/{job}")
        eventually(lambda: step_of(driver) > 5 and len(texts(driver, "figure")) >= 5)
        shutil.rmtree(tmp_path / "runs/gone")
        eventually(lambda: "The folder runs/gone is gone." in texts(driver, ".head .warning"))
        assert len(texts(driver, "figure")) >= 5  # what was seen stays
        eventually(lambda: state_of(driver) == "failed")
        reason = "".join(texts(driver, ".head .problems"))
        assert "the run's folder is gone: it was moved or deleted" in reason
        assert "runs/gone" in reason
        assert "The folder runs/gone is gone." in texts(driver, ".head .warning")
        driver.refresh()
        eventually(lambda: state_of(driver) == "failed" and "is gone" in head(driver))
        assert axe(driver) == []
        press(driver, "Remove from the list")
        eventually(lambda: driver.find_elements("css selector", "dialog"))
        driver.find_element("css selector", "dialog button.danger").click()
        eventually(lambda: "Nothing was started yet." in "".join(texts(driver, ".empty")))
        assert complaints(driver) == []


def test_the_disk_is_full_in_the_middle_of_a_run(tmp_path: pathlib.Path):
    root = tmp_path / "root"
    root.mkdir()
    with disk(root, "24m"), running(root) as board, chromium() as driver:
        job = submit_job(
            board.address, {"recipe": recipe("runs/full", steps=ENDLESS, extra="checkpoint: {every: 20}\n")}
        )
        driver.get(f"{board.address}/#/runs/{job}")
        eventually(lambda: len(texts(driver, "section .row")) >= 2)
        fill(root)
        eventually(lambda: state_of(driver) == "failed")
        reason = "".join(texts(driver, ".head .problems"))
        assert "no space left on the device" in reason
        assert "resume=true goes on from what was saved" in reason
        shown = step_of(driver)
        assert shown > 0
        assert axe(driver) == []

        driver.get(f"{board.address}/#/runs")
        press(driver, "Start a recipe")
        driver.find_element("id", "recipe").send_keys(recipe("runs/other"))
        press(driver, "Start")
        eventually(lambda: "No space left" in "".join(texts(driver, ".launcher .problems")))

        (root / "junk").unlink()
        driver.get(f"{board.address}/#/runs/{job}")
        saved = eventually(lambda: texts(driver, "section .row"))
        press(driver, "Resume")
        eventually(lambda: step_of(driver) > shown + 5)
        press(driver, "Stop and save")
        eventually(lambda: state_of(driver) == "stopped")
        assert saved
        written = steps(root / "runs/full")
        assert written == list(range(1, written[-1] + 1))


def test_one_output_is_started_once(tmp_path: pathlib.Path):
    text = recipe("runs/first", steps=ENDLESS)
    with running(tmp_path) as board, chromium() as first, chromium() as second:
        for driver in (first, second):
            driver.get(f"{board.address}/#/runs")
            press(driver, "Start a recipe")
            driver.find_element("id", "recipe").send_keys(text)
        button = ".launcher button.primary"
        first.execute_script("const b = document.querySelector(arguments[0]); b.click(); b.click()", button)
        second.find_element("css selector", button).click()
        drivers = (first, second)
        eventually(lambda: any("#/runs/" in driver.current_url for driver in drivers))
        refused = eventually(lambda: [driver for driver in drivers if texts(driver, ".launcher .problems")])
        assert len(refused) == 1
        problem = "".join(texts(refused[0], ".launcher .problems"))
        assert "writes to this output and has not ended" in problem
        assert "give another output" in problem
        assert refused[0].find_element("id", "recipe").get_property("value") == text
        assert axe(refused[0]) == []
        assert len(list((tmp_path / "meshtune-board/jobs").iterdir())) == 1
        [started] = [driver for driver in drivers if driver not in refused]
        eventually(lambda: step_of(started) > 0)
        press(started, "Stop and save")
        eventually(lambda: state_of(started) == "stopped")
        # What it has written is not replaced unless that is ticked.
        press(refused[0], "Start")
        eventually(lambda: "is not empty" in "".join(texts(refused[0], ".launcher .problems")))
