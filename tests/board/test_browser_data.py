"""A file dropped on the Data page, its columns mapped by hand, and the compiler's figures of the plan, by clicks."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from browsers import axe, chromium, complaints, eventually, press, running, texts
from clicks import SHORT, follow, pick_model, put, yaml

from meshtune.quickstart import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]

CHATS = [("Who sang?", "The bee sang."), ("Who flew?", "The owl flew."), ("Who ran?", "The <b>dog</b> ran.")]


def drop(driver, path: pathlib.Path, selector: str) -> None:
    """Drags a file of this machine over the middle of an element and lets go, as a hand does."""
    box = driver.find_element("css selector", selector).rect
    at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + min(box["height"], 400) / 2}
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        driver.execute_cdp_cmd("Input.dispatchDragEvent", {"type": kind, **at, "data": data})
        if kind == "dragOver":
            eventually(lambda: driver.find_elements("css selector", ".drop.over"))


def pick(driver, label: str, value: str) -> None:
    """Chooses an option of the list below a label of the only source."""

    def try_picking() -> bool:
        labels = driver.find_elements("css selector", ".source-card label")
        for field in [element.get_attribute("for") for element in labels if element.text == label]:
            driver.find_element("css selector", f"#{field} option[value='{value}']").click()
            return True
        return False

    eventually(try_picking)


@pytest.mark.parametrize("place", [".drop", "h1"])
def test_a_file_is_dropped_and_its_columns_are_mapped_by_hand(tmp_path: pathlib.Path, place: str):
    root, file = tmp_path / "root", tmp_path / "fragen.csv"
    root.mkdir()
    lines = [f"{number},{question},{answer}" for number, (question, answer) in enumerate(CHATS)]
    file.write_text("\n".join(["nummer,frage,antwort", *lines]) + "\n")
    with running(root) as board, chromium() as driver:
        driver.get(board.address)
        pick_model(driver, str(MODEL))
        if place == ".drop":
            put(driver, "model.chat_template", "plain")  # questions and answers are a chat
        follow(driver, "data")
        eventually(lambda: texts(driver, ".drop"))
        drop(driver, file, place)
        eventually(lambda: "The columns are nummer, frage, antwort" in "".join(texts(driver, ".source-card .warning")))
        assert "no format fits" not in driver.find_element("css selector", ".source-card").text  # until it is unfolded
        assert (root / "data/fragen.csv").read_bytes() == file.read_bytes()
        assert not driver.find_elements("css selector", ".drop.over")
        assert texts(driver, ".document") == []
        press(driver, "First records")
        eventually(lambda: {"nummer", "frage", "antwort"} <= set(texts(driver, ".record dt code")))

        if place == ".drop":
            question_field, answer_field = "instruction", "output"
            pick(driver, "Question", "frage")
            pick(driver, "Answer", "antwort")
        else:
            question_field, answer_field = "prompt", "completion"
            pick(driver, "Format", "prompt_completion")
            pick(driver, "prompt", "frage")
            pick(driver, "completion", "antwort")
            eventually(lambda: driver.switch_to.active_element.tag_name == "select")
        eventually(lambda: f"{question_field}: frage" in driver.execute_script("return localStorage.getItem('recipe')"))
        marks = eventually(lambda: texts(driver, ".document mark.trained"))
        assert len(marks) == len(CHATS)
        documents = texts(driver, ".document .tokens")
        for (question, answer), mark, document in zip(CHATS, marks, documents, strict=True):
            assert answer in mark
            assert question in document
            assert question not in mark
        assert "3 records" in "".join(texts(driver, ".source-card"))
        assert texts(driver, ".source-card .problems") == []
        assert axe(driver) == []

        driver.find_element("link text", "To the recipe").click()
        eventually(lambda: f"{question_field}: frage" in yaml(driver) and f"{answer_field}: antwort" in yaml(driver))
        assert "batch_size: 1" in yaml(driver)  # of three records
        assert complaints(driver) == []
        if place != ".drop":
            return
        for path, value in {"output": "runs/fragen", **SHORT}.items():
            put(driver, path, value)
        eventually(lambda: "estimate" in texts(driver, ".plan:not(.stale) .facts dd"))
        press(driver, "Compile for exact figures")
        eventually(lambda: "estimate" not in texts(driver, ".plan:not(.stale) .facts dd") and texts(driver, ".verdict"))
        assert texts(driver, ".plan .problems") == []
        (root / "recipe.yaml").write_text(yaml(driver))
        command = [sys.executable, "-m", "meshtune", "plan", "recipe.yaml", "--target", "1xCPU", "--json"]
        plan = json.loads(subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout)
        assert plan["compiler"] in texts(driver, ".plan .facts dd")
        mebibytes = f"{plan['device_bytes'] / 2**20:.3g} MiB"
        assert mebibytes in "".join(texts(driver, ".verdict")), (mebibytes, texts(driver, ".verdict"))
        assert axe(driver) == []
        assert complaints(driver) == []
