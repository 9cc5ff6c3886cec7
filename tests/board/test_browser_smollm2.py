"""A real chat model of 135 million parameters in a real Chromium: from a file of chats to an answer, and from one of
preferences to an evaluation, by clicks."""

from __future__ import annotations

import json
import pathlib

import pytest
from browsers import axe, choose, chromium, complaints, eventually, press, running, texts
from clicks import follow, jsonl, pick_model, put, run_ends, send_file, yaml

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(1200)]

STEPS = 5


def test_smollm2_is_tuned_and_answers_by_clicks_alone(smollm2: pathlib.Path, tmp_path: pathlib.Path):
    root = tmp_path / "root"
    root.mkdir()
    colours = ["red", "blue", "green", "white"]
    turns = [[("user", f"Say {colour}."), ("assistant", f"Colour: {colour}!")] for colour in colours]
    chats = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns]
    with running(root, "--read", str(smollm2.parent)) as board, chromium() as driver:
        driver.get(board.address)
        pick_model(driver, str(smollm2))
        send_file(driver, jsonl(tmp_path / "chats.jsonl", chats))
        marks = eventually(lambda: texts(driver, ".document mark.trained"))
        assert all(f"Colour: {colour}!" in mark for colour, mark in zip(colours, marks, strict=True))
        driver.find_element("link text", "To the recipe").click()
        press(driver, "LoRA")
        fields = {"output": "runs/colours", "train.steps": str(STEPS), "train.batch_size": "2"}
        fields |= {"data.max_length": "128", "optimizer.learning_rate": "0.002"}
        for path, value in fields.items():
            put(driver, path, value)
        eventually(lambda: texts(driver, ".verdict.fits"))
        tensors = run_ends(driver, root, "runs/colours", 900)
        assert sum(tensor.any() for name, tensor in tensors.items() if "lora_B" in name) == len(tensors) // 2
        rows = [json.loads(line) for line in (root / "runs/colours/metrics.jsonl").read_text().splitlines()]
        losses = [row["loss"] for row in rows if row["kind"] == "train"]
        assert len(losses) == STEPS
        assert losses[-1] < losses[0]

        driver.find_element("css selector", ".head a[href*='talk']").click()
        press(driver, "Load")
        eventually(lambda: "runs/colours" in texts(driver, ".pick"), 300)
        press(driver, "System prompt, sampling, tools")
        for field, value in {"temperature": "0", "max_tokens": "8"}.items():
            driver.find_element("id", field).clear()
            driver.find_element("id", field).send_keys(value)
        driver.find_element("id", "prompt").send_keys("Say blue.\n")
        eventually(lambda: "per second" in "".join(texts(driver, ".figures")), 300)
        assert "olour" in "".join(texts(driver, ".said .answer"))
        assert axe(driver) == []
        follow(driver, "talk")
        press(driver, "Unload")
        eventually(lambda: not texts(driver, ".pick"))
        assert complaints(driver) == []


def test_smollm2_learns_preferences_and_is_evaluated_by_clicks_alone(smollm2: pathlib.Path, tmp_path: pathlib.Path):
    root = tmp_path / "root"
    root.mkdir()
    prompts = ["Say red.", "Say blue.", "Say green.", "Say white."]
    pairs = [{"prompt": prompt, "chosen": f"Colour: {prompt[4:-1]}!", "rejected": "No."} for prompt in prompts]
    held_out = [{"prompt": "Say black.", "completion": "Colour: black!"}]
    with running(root, "--read", str(smollm2.parent)) as board, chromium() as driver:
        driver.get(board.address)
        pick_model(driver, str(smollm2))
        press(driver, "DPO")
        eventually(lambda: "kind: dpo" in yaml(driver))
        send_file(driver, jsonl(tmp_path / "held-out.jsonl", held_out))
        eventually(lambda: (root / "data/held-out.jsonl").exists())
        press(driver, "Remove")
        send_file(driver, jsonl(tmp_path / "pairs.jsonl", pairs))
        eventually(lambda: "format: preference, detected" in "".join(texts(driver, ".source-card")))
        eventually(lambda: any("No." in mark for mark in texts(driver, ".document mark.trained")))
        driver.find_element("link text", "To the recipe").click()
        fields = {"output": "runs/preferred", "train.steps": str(STEPS), "train.batch_size": "2"}
        for path, value in (fields | {"data.max_length": "128", "optimizer.learning_rate": "0.001"}).items():
            put(driver, path, value)
        run_ends(driver, root, "runs/preferred", 900)
        rows = [json.loads(line) for line in (root / "runs/preferred/metrics.jsonl").read_text().splitlines()]
        losses = [row["loss"] for row in rows if row["kind"] == "train"]
        assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: nothing is preferred yet
        assert losses[-1] < losses[0]

        driver.find_element("css selector", ".head a[href*='evaluate']").click()
        eventually(lambda: driver.find_element("id", "model").get_property("value").endswith("runs/preferred"))
        eventually(lambda: driver.find_elements("css selector", "#data-choices option[value='data/held-out.jsonl']"))
        driver.find_element("id", "data").send_keys("data/held-out.jsonl")
        choose(driver, "compare", "base")
        for field, value in {"tokens": "8", "output": "evaluations/preferred"}.items():
            driver.find_element("id", field).send_keys(value)
        press(driver, "Start")
        eventually(lambda: texts(driver, ".result .state") == ["finished"], 600)
        heads = texts(driver, ".figures-table thead th")
        assert heads == ["Figure", "Before tuning", "After tuning"]
        losses = [
            json.loads((root / "evaluations/preferred" / name / "metrics.json").read_text())["loss"]
            for name in ("base", "tuned")
        ]
        assert losses[1] < losses[0]
        eventually(lambda: driver.find_elements("css selector", "iframe.report"))
        assert complaints(driver) == []
