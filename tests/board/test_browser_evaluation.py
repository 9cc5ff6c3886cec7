"""Evaluate in a real Chromium: a tuned run is measured by clicks, on a file of the user's and a task from a file."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from boards import recipe, submit_job
from browsers import IMAGES, axe, choose, chromium, complaints, eventually, look, press, requests_of, running, texts
from published import arc, write_lines

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]

QUESTIONS = ["Who ate the cake?", "What did Tim see?", "Where is <b>Lily</b>?"]
REFERENCES = [" A small mouse ate it.", " Tim saw a red kite.", " Lily is at home."]


def evaluations(folder: pathlib.Path, model: str, name: str) -> list[str]:
    """The answers of a model as the evaluation has written them."""
    lines = (folder / model / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"] for line in lines]


def contrast(driver, selector: str) -> float:
    """The contrast of the text of an element with the first ground below it that is not transparent, as WCAG has it."""
    script = """
    const luminance = (colour) => {
      const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
        .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
      return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const element = document.querySelector(arguments[0]);
    let ground = element;
    while (ground && /, 0\\)$/.test(getComputedStyle(ground).backgroundColor)) ground = ground.parentElement;
    const [one, two] = [getComputedStyle(element).color, getComputedStyle(ground ?? document.body).backgroundColor]
      .map(luminance).sort((first, second) => second - first);
    return (one + 0.05) / (two + 0.05);
    """
    return driver.execute_script(script, selector)


def test_a_run_is_measured_before_and_after_tuning_by_clicks_alone(tmp_path: pathlib.Path):
    root = tmp_path / "root"
    IMAGES.mkdir(parents=True, exist_ok=True)
    arc(root / "data")
    held_out = write_lines(
        tmp_path / "held-out.jsonl",
        [
            {"prompt": question, "completion": reference}
            for question, reference in zip(QUESTIONS, REFERENCES, strict=True)
        ],
    )
    with running(root) as board, chromium() as driver:
        job = submit_job(board.address, {"kind": "train", "recipe": recipe("runs/first", steps=6)})
        driver.get(f"{board.address}/#/data")
        eventually(lambda: driver.find_element("id", "upload")).send_keys(str(held_out))
        eventually(lambda: (root / "data" / "held-out.jsonl").exists())

        driver.get(f"{board.address}/#/runs/{job}")
        eventually(lambda: texts(driver, ".head .state") == ["finished"])
        eventually(lambda: driver.find_element("css selector", ".head a[href*='evaluate']")).click()
        model = eventually(lambda: driver.find_element("id", "model").get_property("value"))
        assert model.endswith("runs/first")
        offered = "#data-choices option[value='data/held-out.jsonl']"
        eventually(lambda: driver.find_elements("css selector", offered))
        driver.find_element("id", "data").send_keys("data/held-out.jsonl")
        driver.find_element("id", "tasks").send_keys("arc_easy=data/none")
        choose(driver, "compare", "base")
        for field, value in {"limit": "5", "tokens": "8", "output": "evaluations/first"}.items():
            driver.find_element("id", field).send_keys(value)
        press(driver, "Start")
        eventually(lambda: "there is nothing at data/none" in "".join(texts(driver, ".problems")))
        driver.find_element("id", "tasks").clear()
        driver.find_element("id", "tasks").send_keys("arc_easy=data/arc")
        press(driver, "Check")
        eventually(lambda: "--tasks arc_easy=data/arc" in "".join(texts(driver, ".copyable code")))
        press(driver, "Start")

        # It unfolds by itself, and says how far it is.
        eventually(lambda: texts(driver, ".result .state") == ["running"])
        eventually(lambda: "0 of 3 records were trained on" in "".join(texts(driver, "details[open] .log")))
        eventually(lambda: texts(driver, ".result .state") == ["finished"])
        eventually(lambda: driver.find_elements("css selector", "iframe.report"))

        folder = root / "evaluations" / "first"
        heads = texts(driver, ".figures-table thead th")
        assert heads == ["Figure", "Before tuning", "After tuning"]
        shown = {row[0]: row[1:] for row in (text.rsplit(" ", 2) for text in texts(driver, ".figures-table tbody tr"))}
        for column, name in enumerate(("base", "tuned")):
            loss = json.loads((folder / name / "metrics.json").read_text())["loss"]
            assert float(shown["loss"][column]) == pytest.approx(loss, rel=1e-3)  # four digits are shown
            metrics = json.loads((folder / name / "tasks.json").read_text())["tasks"][0]["metrics"]
            assert float(shown["arc_easy acc"][column]) == pytest.approx(metrics["acc,none"], rel=1e-3)
        assert shown["loss"][0] != shown["loss"][1]

        rows = driver.find_elements("css selector", ".answers-table tbody tr")
        cells = [[cell.get_property("textContent") for cell in row.find_elements("tag name", "td")] for row in rows]
        answers = [evaluations(folder, name, "predictions.jsonl") for name in ("base", "tuned")]
        assert cells == [list(row) for row in zip(QUESTIONS, REFERENCES, *answers, strict=True)]
        assert not driver.find_elements("css selector", ".answers-table b")

        # As the system is, and as it was chosen on the board against the system.
        for system_dark, theme in ((False, "system"), (True, "system"), (False, "dark"), (True, "light")):
            look(driver, 1280, 1000, dark=system_dark)
            driver.find_element("css selector", f".settings option[value='{theme}']").click()
            driver.execute_script("document.querySelector('.figures-table').scrollIntoView()")
            driver.save_screenshot(str(IMAGES / f"evaluated-{'dark' if system_dark else 'light'}-{theme}.png"))
            violations = axe(driver)
            driver.switch_to.frame(driver.find_element("css selector", "iframe.report"))
            assert "Answers" in texts(driver, "h2")
            assert QUESTIONS[2] in driver.find_element("tag name", "body").text
            ratios = {element: contrast(driver, element) for element in ("h1", "li", "td", "th", ".note")}
            is_dark = driver.execute_script(
                "return getComputedStyle(document.body).backgroundColor !== 'rgb(255, 255, 255)'"
            )
            driver.switch_to.default_content()
            assert violations == []
            assert min(ratios.values()) >= 4.5, (system_dark, theme, ratios)
            assert is_dark == (system_dark if theme == "system" else theme == "dark"), (system_dark, theme)
        assert all(re.match(rf"{board.address}/|data:|chrome", url) for url in requests_of(driver))
        assert complaints(driver) == []
