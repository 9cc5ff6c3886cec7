"""The pictures of docs/board.md: every page of a project with two runs, an evaluation, an export and a loaded model.

After `make test-board`, which installs what is needed, this takes docs/images/board-PAGE-THEME.png again and nothing
else:

    MESHTUNE_SCREENSHOTS=docs/images .venv/bin/python -m pytest -m browser tests/board/test_browser_pictures.py
"""

from __future__ import annotations

import io
import json
import pathlib
import shutil
from typing import Any

import pytest
from boards import submit_job
from browsers import IMAGES, axe, chromium, complaints, eventually, look, press, running, texts
from clicks import follow, jsonl
from PIL import Image

from meshtune.quickstart import DIRECTORY, LESSON, MODEL

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(900)]

COLOURS = 256
QUESTION = "There was once a brave lion named Daisy."
RECIPE = """\
model: {{path: models/stories260K, chat_template: plain}}
output: runs/{name}
data: {{train: data/stories.jsonl, max_length: 256, validation: 16}}
method: {{kind: lora, rank: 8, train_modules: [embed_tokens]}}
optimizer: {{learning_rate: {rate}}}
train: {{steps: 80, batch_size: 4}}
eval: {{every: 20}}
sample: {{prompts: ["{question}"], max_tokens: 60}}
"""
# The page shows where package and project lie on this machine; a reader's lie elsewhere.
SHORTEN_PATHS = """
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode;
  text.data = text.data.replaceAll(arguments[0], 'meshtune/quickstart').replaceAll(arguments[1], '');
}
"""


def stories(count: int) -> list[dict[str, Any]]:
    """The first of the quickstart's stories, as chats."""
    records = [json.loads(line) for line in LESSON.read_text(encoding="utf-8").splitlines()[:count]]
    keys = {"prompt": "user", "completion": "assistant"}
    return [
        {"messages": [{"role": role, "content": record[key].strip()} for key, role in keys.items()]}
        for record in records
    ]


def picture(driver: Any, root: pathlib.Path, name: str) -> list[str]:
    """Saves the page in both themes as board-NAME-THEME.png, and returns what axe finds."""
    violations = []
    driver.execute_script(SHORTEN_PATHS, str(DIRECTORY), f"{root}/")
    for theme in ("light", "dark"):
        look(driver, 1280, 1000, dark=theme == "dark")
        eventually(lambda: driver.execute_script("return document.getAnimations().length === 0"))
        image = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
        few_colours = image.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few_colours.save(IMAGES / f"board-{name}-{theme}.png", optimize=True)
        violations += [f"{name} {theme}: {violation}" for violation in axe(driver)]
    return violations


def test_every_page_of_a_project_in_both_themes(tmp_path: pathlib.Path):
    root = tmp_path / "root"
    IMAGES.mkdir(parents=True, exist_ok=True)
    shutil.copytree(MODEL, root / "models" / "stories260K")
    records = stories(120)
    jsonl(root / "data" / "stories.jsonl", records[:-8])
    jsonl(root / "data" / "held-out.jsonl", records[-8:])
    recipes = {
        name: RECIPE.format(name=name, rate=rate, question=QUESTION) for name, rate in (("slow", 2e-3), ("fast", 1e-2))
    }
    violations = []
    with running(root) as board, chromium() as driver:
        driver.get(board.address)
        eventually(lambda: texts(driver, "nav a"))
        jobs = [submit_job(board.address, {"kind": "train", "recipe": recipe}) for recipe in recipes.values()]
        for job in jobs:
            driver.get(f"{board.address}/#/runs/{job}")
            eventually(lambda: texts(driver, ".head .state") == ["finished"])
        evaluation = {"kind": "eval", "model": "runs/fast", "compare": "base", "data": "data/held-out.jsonl"}
        for body in (
            evaluation | {"max_tokens": 60, "output": "evaluations/fast"},
            {"kind": "export", "model": "runs/fast", "form": "gguf", "type": "Q8_0", "merge": True},
        ):
            driver.get(f"{board.address}/#/runs/{submit_job(board.address, body)}")
            eventually(lambda: texts(driver, ".head .state") == ["finished"])

        follow(driver, "model")
        eventually(lambda: texts(driver, ".models .held"))
        violations += picture(driver, root, "model")

        follow(driver, "recipe")
        eventually(lambda: driver.find_element("id", "yaml"))
        content = {
            "model": {"path": "models/stories260K", "chat_template": "plain"},
            "output": "runs/next",
            "data": {"train": "data/stories.jsonl", "max_length": 256, "validation": 16},
        }
        driver.execute_script("localStorage.setItem('recipe', arguments[0])", json.dumps(content))
        driver.refresh()
        eventually(lambda: texts(driver, ".plan:not(.stale) .facts"))
        violations += picture(driver, root, "recipe")

        follow(driver, "data")
        eventually(lambda: texts(driver, "mark.trained"))
        violations += picture(driver, root, "data")

        follow(driver, "runs")
        eventually(lambda: "fast" in "".join(texts(driver, "main")))
        violations += picture(driver, root, "runs")
        driver.get(f"{board.address}/#/runs/{jobs[1]}")
        eventually(lambda: texts(driver, ".head .state") == ["finished"])
        violations += picture(driver, root, "run")

        driver.get(f"{board.address}/#/compare/{'/'.join(jobs)}")
        eventually(lambda: "learning_rate" in "".join(texts(driver, "main table")))
        violations += picture(driver, root, "compare")

        follow(driver, "evaluate")
        eventually(lambda: driver.find_element("css selector", "summary.result")).click()
        eventually(lambda: texts(driver, ".figures-table tbody tr"))
        driver.execute_script("document.querySelector('.figures-table').scrollIntoView()")
        violations += picture(driver, root, "evaluate")

        follow(driver, "export")
        eventually(lambda: texts(driver, ".result"))
        violations += picture(driver, root, "export")

        follow(driver, "talk")
        eventually(lambda: driver.find_element("id", "model")).send_keys("runs/fast")
        press(driver, "Load")
        eventually(lambda: "runs/fast" in texts(driver, ".pick"))
        press(driver, "System prompt, sampling, tools")
        for field, value in {"temperature": "0", "max_tokens": "100"}.items():
            driver.find_element("id", field).clear()
            driver.find_element("id", field).send_keys(value)
        press(driver, "System prompt, sampling, tools")
        driver.find_element("id", "prompt").send_keys(QUESTION + "\n")
        eventually(lambda: "tokens" in "".join(texts(driver, ".figures")))
        violations += picture(driver, root, "talk")
        press(driver, "Unload")
        eventually(lambda: not texts(driver, ".pick"))
        assert complaints(driver) == []
    assert violations == []
