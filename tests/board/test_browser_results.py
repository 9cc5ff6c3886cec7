"""Talk and Export in a real Chromium: a model is loaded, answers, outlives the board, is written as GGUF by clicks."""

from __future__ import annotations

import pathlib

import pytest
from boards import READABLE
from browsers import choose, chromium, complaints, eventually, press, running, texts

from meshtune.quickstart import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]


def test_a_model_is_loaded_answers_and_outlives_the_board(tmp_path: pathlib.Path):
    with running(tmp_path, "--read", str(READABLE[0])) as board, chromium() as driver:
        driver.get(f"{board.address}/#/talk")
        choose(driver, "template", "plain")
        driver.find_element("id", "model").send_keys(str(MODEL))
        press(driver, "Load")
        eventually(lambda: texts(driver, ".pick"))
        driver.find_element("id", "prompt").send_keys("Once upon a time\n")
        eventually(lambda: "tokens" in "".join(texts(driver, ".figures")))
        answer = texts(driver, ".said .answer")
        assert answer[0].strip()
        board.kill()
        board.start()
        driver.refresh()
        eventually(lambda: texts(driver, ".pick"))
        assert texts(driver, ".said .answer") == answer
        press(driver, "Edit")
        driver.find_element("id", "prompt").send_keys(" there was <b>bold</b>\n")
        eventually(lambda: "tokens" in "".join(texts(driver, ".figures")))
        assert texts(driver, ".asked .answer") == ["Once upon a time there was <b>bold</b>"]
        assert not driver.find_elements("css selector", ".asked b")
        press(driver, "Unload")
        eventually(lambda: not texts(driver, ".pick"))
        assert complaints(driver) == []


def test_a_model_is_exported_as_gguf(tmp_path: pathlib.Path):
    with running(tmp_path, "--read", str(READABLE[0])) as board, chromium(width=390, height=844) as driver:
        driver.get(f"{board.address}/#/export")
        choose(driver, "form", "gguf")
        driver.find_element("id", "model").send_keys(str(MODEL))
        press(driver, "Start")
        eventually(lambda: texts(driver, ".result .state") == ["finished"])
        eventually(lambda: "model-q8_0.gguf" in texts(driver, ".files a"))
        assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
