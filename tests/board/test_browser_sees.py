"""A model that sees, in Talk in a real Chromium: a picture that is chosen, one that is pasted, and the answer."""

from __future__ import annotations

import json

import pytest
from browsers import IMAGES, chromium, complaints, eventually, press, running, texts

from meshtune.generate.api import load
from seeing_model import picture, save_seeing_model

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]

# A paste of a picture that the page draws itself.
PASTE = """
const [done] = arguments;
const canvas = Object.assign(document.createElement('canvas'), { width: 30, height: 20 });
canvas.getContext('2d').fillRect(5, 5, 10, 10);
canvas.toBlob((blob) => {
  const data = new DataTransfer();
  data.items.add(new File([blob], 'pasted.png', { type: 'image/png' }));
  const paste = new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true });
  document.getElementById('prompt').dispatchEvent(paste);
  done();
});
"""
SHOWN = "return [...document.querySelectorAll(arguments[0])].filter((image) => image.naturalWidth > 0).length"


def test_pictures_are_attached_shown_and_answered(tmp_path, shared):
    root = tmp_path / "root"
    model = save_seeing_model(root / "models" / "sees", shared)
    picture(1).save(root / "cat.png")
    (root / "note.txt").write_text("no picture")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with running(root) as board, chromium() as driver:
        driver.get(f"{board.address}/#/talk")
        eventually(lambda: driver.find_element("id", "model")).send_keys("models/sees")
        press(driver, "Load")
        eventually(lambda: "models/sees" in texts(driver, ".pick"))
        box = driver.find_element("css selector", ".pick input")
        if not box.is_selected():
            box.click()
        press(driver, "System prompt, sampling, tools")
        for field, value in (("temperature", "0"), ("max_tokens", "8")):
            element = driver.find_element("id", field)
            element.clear()
            element.send_keys(value)
        chosen = driver.find_element("id", "pictures")
        chosen.send_keys(str(root / "note.txt"))
        eventually(lambda: "note.txt is no picture" in driver.find_element("css selector", ".attached").text)
        chosen.send_keys(str(root / "cat.png"))
        eventually(lambda: driver.execute_script(SHOWN, ".attached img") == 1)
        driver.find_element("id", "prompt").send_keys("What is it?\n")
        eventually(lambda: driver.execute_script(SHOWN, ".asked img") == 1)
        assert driver.execute_script(SHOWN, ".attached img") == 0

        def answer() -> str:
            card = driver.find_elements("css selector", ".turn:last-child .speaker")[0]
            return card.text if card.get_attribute("aria-busy") == "false" else ""

        parts = [{"type": "image", "image": root / "cat.png"}, {"type": "text", "text": "What is it?"}]
        expected = load(model, dtype="float32").generate([{"role": "user", "content": parts}], max_tokens=8)
        assert expected.split()[0] in eventually(answer)
        driver.save_screenshot(str(IMAGES / "talk-pictures.png"))

        driver.execute_async_script(PASTE)
        eventually(lambda: driver.execute_script(SHOWN, ".attached img") == 1)
        driver.find_element("id", "prompt").send_keys("And this?\n")
        eventually(lambda: len(driver.find_elements("css selector", ".turn")) == 2 and answer())
        assert driver.execute_script(SHOWN, ".asked img") == 2
        assert not driver.find_elements("css selector", ".turn .problems")
        assert complaints(driver) == []


def test_a_folder_of_pictures_is_uploaded_as_one(tmp_path):
    """What is neither a picture nor a table stays."""
    folder, root = tmp_path / "cats", tmp_path / "root"
    (folder / "small").mkdir(parents=True)
    picture(1).save(folder / "small" / "1.png")
    turns = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."}]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": turns, "images": ["small/1.png"]}) + "\n")
    (folder / "notes.docx").write_bytes(b"other")
    with running(root) as board, chromium() as driver:
        driver.get(f"{board.address}/#/data")
        eventually(lambda: driver.find_element("id", "upload-folder")).send_keys(str(folder))
        eventually(lambda: "data/cats/cats/rows.jsonl" in driver.find_element("css selector", ".side").text)
        assert complaints(driver) == []
    unpacked = root / "data" / "cats" / "cats"
    assert sorted(str(path.relative_to(unpacked)) for path in unpacked.rglob("*.*")) == ["rows.jsonl", "small/1.png"]
    assert (unpacked / "small" / "1.png").read_bytes() == (folder / "small" / "1.png").read_bytes()
