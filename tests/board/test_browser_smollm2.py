"""A real chat model of 135 million parameters in a real Chromium: from a file of chats to an answer by clicks."""

from __future__ import annotations

import json
import pathlib

import pytest
from browsers import axe, chromium, complaints, eventually, press, running, texts
from clicks import follow, jsonl, pick_model, put, run_ends, send_file

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
