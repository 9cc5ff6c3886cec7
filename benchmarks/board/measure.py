"""The board in a real Chromium: what its page weighs, when it is first seen, and whether 10,000 updates stutter.

    python benchmarks/board/measure.py [--rounds 7] [--json benchmarks/board/result.json]

Needs Debian's chromium and chromium-driver, and selenium (make test-board). The run whose updates are shown is written
by this program, row by row; everything else is the board as it is started by `meshtune board`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests/board"))
from boards import request, wait
from browsers import CHROMIUM, chromium, eventually, running

import meshtune.board
from meshtune.board import queue
from meshtune.board.job import replace_json
from meshtune.board.workspace import workspace_at

UPDATES = 10_000
LIVE_SECONDS = 20.0  # in which they arrive
CHUNKS_PER_SECOND = 20
# What says that a page shows its data, and not only its frame.
PAGES = {
    "Runs": ("#/runs", "document.querySelector('.run .state')"),
    "Model": ("#/model", "document.querySelector('table.models tbody td')"),
    "Recipe": ("#/recipe", "document.querySelector('.field input')"),
    "a run of 10,000 updates": ("#/runs/{job}", "document.querySelectorAll('.legend')[5]?.textContent"),
}
SHOWN = """
window.shownAt = null;
const look = () => { if (%s) window.shownAt = performance.now(); else requestAnimationFrame(look); };
requestAnimationFrame(look);
"""
FRAMES = """
window.slowFrames = []; window.frameCount = 0; window.longTasks = [];
let last = performance.now();
const tick = (now) => {
  window.frameCount += 1;
  if (now - last > 50) window.slowFrames.push(now - last);
  last = now;
  requestAnimationFrame(tick);
};
requestAnimationFrame(tick);
"""
CAPTIONS = "return [...document.querySelectorAll('figcaption')].map((one) => one.textContent).join()"
LAST = "9.77 KiB"  # the memory that the last update says it takes: 10,000 bytes


def rows() -> Iterator[str]:
    """The lines of a metrics.jsonl: as many figures as a run on two GPUs writes."""
    for n in range(1, UPDATES + 1):
        yield json.dumps(
            {"kind": "train", "step": n, "epoch": n / 1000, "loss": 2 / n**0.3 + (n * 7919 % 101) / 500}
            | {"grad_norm": 1 + (n * 104729 % 97) / 97, "learning_rate": 1e-4 * (1 - n / UPDATES), "tokens": 4096}
            | {"learned_tokens": 3000, "tokens_per_second": 9000.0 + n % 211, "memory": n}
            | {"machine": {f"device{d}_{what}": 100.0 + d + n % 13 for d in (0, 1) for what in ("memory", "power")}}
            | {"seconds": 0.5}
        )
        if n % 500 == 0:
            yield json.dumps(
                {"kind": "eval", "step": n, "epoch": n / 1000, "loss": 2 / n**0.3, "best": True, "seconds": 1}
            )


def run_of(workspace: Any, name: str) -> tuple[str, pathlib.Path]:
    """A finished job and the metrics.jsonl of its run, which is empty."""
    output = workspace.root / "runs" / name
    output.mkdir(parents=True)
    replace_json(output / "run.json", {"status": "running", "total": UPDATES})
    job = queue.add(workspace, request(workspace, "version", name=name, output=str(output)))
    wait(lambda: queue.find(workspace, job.id).state == "finished")
    return job.id, output / "metrics.jsonl"


def transferred(driver: Any) -> dict[str, int]:
    """Bytes by address, headers included, of what the page asked for."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    addresses = {params["requestId"]: params["request"]["url"] for params in asked}
    sizes: dict[str, int] = {}
    for message in messages:
        if message["method"] == "Network.loadingFinished":
            address = addresses.get(message["params"]["requestId"], "")
            sizes[address] = sizes.get(address, 0) + message["params"]["encodedDataLength"]
    return sizes


def first_view(address: str, page: str, shown: str) -> dict[str, float]:
    """One cold start: a browser that has nothing of the page. Milliseconds since navigation began, and bytes."""
    with chromium() as driver:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": SHOWN % shown})
        driver.get(f"{address}/{page}")
        eventually(lambda: driver.execute_script("return window.shownAt"))
        time.sleep(0.5)
        paint = driver.execute_script("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
        tasks = driver.execute_script("return window.longTasks")
        data = driver.execute_script("return window.shownAt")
        sizes = transferred(driver).items()
    files = [size for url, size in sizes if url.startswith(address) and "/api/" not in url]
    figures = {"paint": paint, "data": data, "longest_task": max(tasks, default=0)}
    return figures | {"bytes": sum(files), "files": len(files)}


def live(address: str, job: str, metrics: pathlib.Path) -> dict[str, Any]:
    """The page of a run while its updates arrive. Milliseconds of frames and tasks that took longer than 50."""
    lines = list(rows())
    with chromium() as driver:
        driver.get(f"{address}/#/runs/{job}")
        eventually(lambda: driver.find_elements("css selector", ".head h1"))
        time.sleep(2)
        driver.execute_script(FRAMES)
        began = time.monotonic()
        writer = threading.Thread(target=_write, args=(metrics, lines))
        writer.start()
        eventually(lambda: LAST in driver.execute_script(CAPTIONS))
        seconds = time.monotonic() - began
        writer.join()
        names = ("frameCount", "slowFrames", "longTasks")
        frames, slow, tasks = (driver.execute_script(f"return window.{name}") for name in names)
    return {"seconds": seconds, "frames": frames, "frames_over_50_ms": slow, "tasks_over_50_ms": tasks}


def _write(metrics: pathlib.Path, lines: list[str]) -> None:
    size = -(-len(lines) // int(LIVE_SECONDS * CHUNKS_PER_SECOND))
    with metrics.open("a", encoding="utf-8") as file:
        for start in range(0, len(lines), size):
            file.write("\n".join(lines[start : start + size]) + "\n")
            file.flush()
            time.sleep(1 / CHUNKS_PER_SECOND)


def page_files() -> dict[str, int]:
    """Bytes of the page's files: all of them with the largest language, and the same with all languages."""
    folder = pathlib.Path(meshtune.board.__file__).parent / "page"
    sizes = {path.relative_to(folder): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    texts = {path: size for path, size in sizes.items() if path.parts[0] == "text"}
    languages = [
        sum(size for path, size in texts.items() if path.stem == language) for language in {path.stem for path in texts}
    ]
    whole = sum(sizes.values())
    return {"one_language": whole - sum(languages) + max(languages), "all_languages": whole, "files": len(sizes)}


def main() -> None:
    """Measures everything, prints it, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    result: dict[str, Any] = {
        "load_before": os.getloadavg(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    result["chromium"] = subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True).stdout.strip()
    result["selenium"] = importlib.metadata.version("selenium")
    result["page_bytes"] = page_files()
    with tempfile.TemporaryDirectory() as folder:
        workspace = workspace_at(pathlib.Path(folder))
        whole, metrics = run_of(workspace, "whole")
        metrics.write_text("\n".join(rows()) + "\n", encoding="utf-8")
        growing, arriving = run_of(workspace, "growing")
        with running(workspace.root) as board:
            views: dict[str, list[dict[str, float]]] = {name: [] for name in PAGES}
            for _ in range(given.rounds):
                for name, (page, shown) in PAGES.items():
                    views[name].append(first_view(board.address, page.format(job=whole), shown))
            result["views"] = {name: summary(measured) for name, measured in views.items()}
            result["live"] = live(board.address, growing, arriving)
    result["load_after"] = os.getloadavg()
    print(json.dumps(result, indent=2))
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def summary(measured: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, least and largest of every figure."""
    columns = {key: sorted(one[key] for one in measured) for key in measured[0]}
    return {key: {"median": statistics.median(v), "least": v[0], "largest": v[-1]} for key, v in columns.items()}


if __name__ == "__main__":
    main()
