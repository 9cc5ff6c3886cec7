"""From documents to the training form by clicks, with a teacher behind HTTP whose key is in the environment only."""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

import pytest
from browsers import axe, choose, chromium, complaints, eventually, look, press, running, texts
from clicks import follow, put, yaml
from made_documents import write_documents
from teacher_stub import KEY, answer, teacher_stub

from meshtune.quickstart import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]
pytest.importorskip("markitdown", reason="the extra synth is not installed")
pytest.importorskip("datasketch", reason="the extra synth is not installed")
VARIABLE = "MESHTUNE_TEACHER_OF_THE_TEST"


def sometimes_refuses(body: dict[str, Any]) -> str:
    """The stub's answers; some pairs are refusals, which a filter drops."""
    text = answer(body)
    if '"pairs"' in text and hashlib.sha256(text.encode()).digest()[0] % 3 == 0:
        return json.dumps({"pairs": [{"question": "Why?", "answer": "I'm sorry, but I cannot say that."}]})
    return text


def set_field(driver: Any, path: str, value: str) -> None:
    field = driver.find_element("css selector", f"[data-path='{path}'] :is(input, textarea)")
    field.clear()
    field.send_keys(value + "\t")
    eventually(lambda: value in yaml(driver))


def draft(driver: Any) -> str:
    return driver.execute_script("return localStorage.getItem('data-recipe') ?? ''")


def test_documents_become_records_and_fill_the_training_form(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, KEY)
    root, sources = tmp_path / "root", tmp_path / "sources"
    root.mkdir()
    write_documents(sources)
    sent = [sources / name for name in ("0.md", "1.md", "2.md", "3.md", "0.html", "0.docx", "all.pdf")]
    (tmp_path / "broken.pdf").write_bytes(b"no PDF")
    with teacher_stub(KEY, delay=0.5) as stub, running(root, "--run-code") as board, chromium() as driver:
        stub.answer = sometimes_refuses
        driver.get(board.address)
        follow(driver, "generate", "Make data")
        picker = eventually(lambda: driver.find_element("id", "upload"))
        picker.send_keys("\n".join(map(str, [*sent, tmp_path / "broken.pdf"])))
        eventually(lambda: "the file is no PDF" in "".join(texts(driver, "[data-part=documents] .problems")))
        assert {path.name for path in (root / "documents").iterdir()} == {path.name for path in sent}
        eventually(lambda: len(texts(driver, ".chosen .path")) == len(sent))
        assert "output: made/0-1" in yaml(driver)

        # A template is shown, copied and changed.
        press(driver, "Template")
        area = driver.find_element("css selector", "[data-kind=qa] textarea")
        assert area.get_property("readOnly")
        press(driver, "Copy and change")
        changed = (
            area.get_property("value")
            .replace("You write questions", "You love questions")
            .replace("of: passage", "of: pasage")
        )
        driver.execute_script("arguments[0].value = arguments[1]", area, changed)
        press(driver, "Save and use")
        eventually(lambda: texts(driver, "[data-kind=qa] .problems"))
        driver.execute_script("arguments[0].value = arguments[1]", area, changed.replace("pasage", "passage"))
        press(driver, "Save and use")
        eventually(lambda: driver.find_elements("css selector", "[data-kind='templates/my-qa.yaml']"))
        assert "You love questions" in (root / "templates/my-qa.yaml").read_text()

        # The key itself, in the place of its variable, is kept nowhere.
        set_field(driver, "teacher.path", stub.address)
        set_field(driver, "teacher.key", "sk_pasted_by_mistake")
        eventually(lambda: "no variable of this name" in "".join(texts(driver, "[data-path='teacher.key'] .wrong")))
        assert "sk_pasted" not in draft(driver)
        set_field(driver, "teacher.key", VARIABLE)
        eventually(lambda: VARIABLE in draft(driver))
        set_field(driver, "held_out", "0.2")
        press(driver, "All other keys")
        set_field(driver, "teacher.at_once", "2")
        driver.find_element("id", "kind-0-repeat").send_keys("4\t")
        eventually(lambda: "repeat: 4" in yaml(driver))
        press(driver, "Show them")
        eventually(lambda: "my-qa.yaml of documents" in "".join(texts(driver, ".side summary")))
        assert not stub.requests
        assert axe(driver) == []

        driver.find_element("css selector", ".launcher button.primary").click()
        eventually(lambda: texts(driver, ".made .message"))  # the newest, while others are made
        eventually(lambda: "left" in "".join(texts(driver, ".result .progress")), 60)
        press(driver, "Stop")
        eventually(lambda: driver.find_elements("css selector", ".result .state.stopped"), 60)
        answered = len(stub.requests)
        press(driver, "Go on")
        eventually(lambda: driver.find_elements("css selector", ".result .state.finished"))
        report = json.loads((root / "made/0-1/generated.json").read_text())
        assert report["requests"]["of the journal"] > 0
        assert len(stub.requests) <= answered + report["requests"]["asked"]
        assert stub.requests[0]["messages"][0]["content"].startswith("You love questions")

        facts = dict(zip(texts(driver, ".made .facts dt"), texts(driver, ".made .facts dd"), strict=True))
        assert int(facts["Records"]) == sum(report["records"].values())
        assert int(facts["Dropped"]) == sum(report["dropped"].values()) > 0
        refusals = eventually(
            lambda: next(
                s for s in driver.find_elements("css selector", ".made summary") if s.text.startswith("Refusals")
            )
        )
        assert f" {report['dropped']['refusals']} " in refusals.text
        refusals.click()
        eventually(lambda: "I'm sorry, but I cannot" in "".join(texts(driver, ".made .record")))
        rows = [json.loads(line) for line in (root / "made/0-1/records.jsonl").read_text().splitlines()]
        last = rows[min(len(rows), 20) - 1]
        shown = eventually(
            lambda: [record for record in texts(driver, ".made .record") if last["messages"][1]["content"] in record]
        )
        assert last["provenance"]["source"] in shown[0]
        assert axe(driver) == []
        for width, dark in ((390, False), (1280, True)):
            look(driver, width, 900, dark=dark)
            wide = driver.execute_script(
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide == 0
            assert axe(driver) == []
        choose(driver, "add-kind", "preferences")  # still a form, beside its results
        eventually(lambda: driver.find_elements("css selector", "[data-kind=preferences]"))
        driver.refresh()
        eventually(lambda: driver.find_elements("css selector", "[data-kind=preferences]"))
        driver.find_element("css selector", ".result").click()

        press(driver, "Train on these records")
        eventually(lambda: "records.jsonl" in yaml(driver) and "held-out.jsonl" in yaml(driver))
        put(driver, "model.path", str(MODEL))
        eventually(lambda: texts(driver, ".plan .verdict"))
        assert "It fits." in texts(driver, ".plan .verdict")[0]
        assert complaints(driver) == []
    for path in root.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
