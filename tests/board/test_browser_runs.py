"""The page of runs in a real Chromium: a run by clicks, through a reload, a killed server and a second browser."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from boards import recipe, request, wait
from browsers import IMAGES, axe, chromium, complaints, eventually, look, press, requests_of, running, texts
from PIL import Image

from meshtune.board import queue
from meshtune.board.job import replace_json
from meshtune.board.workspace import workspace_at
from meshtune.data.pictures.files import thumbnail
from meshtune.train.report.events import RolledOut, Sampled, Stepped
from meshtune.train.report.metrics_log import MetricsLog

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]

STEPS = 1500
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
LANGUAGES = {"en": "Runs", "zh": "运行", "ru": "Запуски", "ko": "실행", "ja": "実行"}


def step_of(driver) -> int:
    """The update that the head of a run's page shows; 0 before the first."""
    shown = re.search(r"update ([\d,]+) of", "".join(texts(driver, ".head .progress")))
    return int(shown[1].replace(",", "")) if shown else 0


def state_of(driver) -> str:
    return "".join(texts(driver, ".head .state"))


def test_a_run_by_clicks_through_reload_kill_and_a_second_browser(tmp_path: pathlib.Path):
    with running(tmp_path) as board, chromium() as driver:
        driver.get(f"{board.address}/#/runs")
        press(driver, "Start a recipe")
        driver.find_element("id", "recipe").send_keys(recipe("runs/first", steps=STEPS, extra="trian: 1\n"))
        press(driver, "Check")
        eventually(lambda: "did you mean 'train'?" in "".join(texts(driver, ".problems")))
        driver.execute_script("const r = document.getElementById('recipe'); r.value = r.value.replace('trian: 1', '')")
        press(driver, "Start")
        eventually(lambda: step_of(driver) > 20)
        eventually(lambda: len(texts(driver, "figure")) >= 5)

        driver.refresh()
        before = eventually(lambda: step_of(driver))
        eventually(lambda: len(texts(driver, "figure")) >= 5)
        assert "update" in "".join(texts(driver, ".log"))

        board.kill()
        eventually(lambda: "does not answer" in "".join(texts(driver, ".connection")))
        board.start()
        eventually(lambda: step_of(driver) > before + 20)
        eventually(lambda: texts(driver, ".connection") == [""])

        with chromium() as second:
            second.get(driver.current_url)
            eventually(lambda: step_of(second) > before)
            press(driver, "Stop and save")
            eventually(lambda: state_of(second) in ("stopping", "stopped"))
            eventually(lambda: state_of(driver) == "stopped")
            eventually(lambda: state_of(second) == "stopped")
        stopped = step_of(driver)
        assert before < stopped < STEPS
        eventually(lambda: f"after update {stopped:,}" in "".join(texts(driver, "section .row")))
        press(driver, "Resume")
        eventually(lambda: step_of(driver) > stopped)
        press(driver, "Stop and save")
        eventually(lambda: state_of(driver) == "stopped")
        assert all(url.startswith((board.address, "data:", "chrome")) for url in requests_of(driver))
        assert complaints(driver) == []


@pytest.fixture(scope="module")
def hostile_board(tmp_path_factory: pytest.TempPathFactory):
    """(board, driver, job): a run of 10,000 updates whose every text is hostile, and another job."""
    root = tmp_path_factory.mktemp("root")
    workspace = workspace_at(root)
    output = root / "runs" / "evil"
    output.mkdir(parents=True)
    rows = [
        {
            "kind": "train",
            "step": n,
            "epoch": n / 100,
            "loss": 2 / n**0.3 + (n % 7) / 50,
            "grad_norm": 1 / n,
            HOSTILE: 1.0,
        }
        | {
            "learning_rate": 1e-4,
            "tokens": 9,
            "learned_tokens": 9,
            "seconds": 0.1,
            "tokens_per_second": 90.0,
            "memory": n,
        }
        | {"machine": {"device0_memory": n, "device1_memory": 2 * n, "device0_power": 300.0}}
        for n in range(1, 10_001)
    ]
    rows += [
        {"kind": "eval", "step": n, "epoch": 1.0, "loss": 2 / n**0.3, "best": True, "seconds": 1}
        for n in range(500, 10_001, 500)
    ]
    # Lines of the first version, without checksums, end with memory or seconds.
    lines = [json.dumps({**{k: v for k, v in row.items() if k != "seconds"}, "seconds": 1}) for row in rows]
    (output / "metrics.jsonl").write_text("\n".join(lines) + "\nbroken\n")
    samples = [{"step": n, "prompt": HOSTILE, "text": f"{HOSTILE} {n}"} for n in (1, 2)]
    (output / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)) + "\n")
    replace_json(output / "run.json", {"status": "finished", "total": 10_000})
    (output / "recipe.yaml").write_text(HOSTILE)
    (output / "checkpoints" / "10000").mkdir(parents=True)
    job = queue.add(workspace, request(workspace, "version", name=f"evil {HOSTILE}", output=str(output)), HOSTILE)
    wait(lambda: queue.find(workspace, job.id).state == "finished")
    (job.folder / "log.txt").write_text(f"{HOSTILE}\n" + "x" * 3_000_000 + "\nthe end\n")
    queue.add(workspace, request(workspace, "train", "none.yaml", name="failing"))
    with running(root) as board, chromium() as driver:
        yield board, driver, job


def test_hostile_text_stays_text(hostile_board):
    board, driver, job = hostile_board
    driver.get(f"{board.address}/#/runs/{job.id}")
    eventually(lambda: "the end" in "".join(texts(driver, ".log")))
    eventually(lambda: HOSTILE in "".join(texts(driver, ".answer")))
    for page in (f"#/runs/{job.id}", "#/runs"):
        driver.get(f"{board.address}/{page}")
        eventually(lambda: HOSTILE in driver.find_element("tag name", "main").text)
        assert "owned" not in driver.title
        assert driver.find_elements("css selector", "main img, main script, main iframe") == []
    driver.get(f"{board.address}/api/jobs/{job.id}/report")
    assert HOSTILE in driver.find_element("tag name", "body").text
    assert driver.find_elements("css selector", "img, script") == []
    assert complaints(driver) == []


def test_samples_are_shown_with_the_pictures_of_their_prompts(tmp_path: pathlib.Path):
    """Two questions of the same words about two pictures; what is no picture is left out."""
    workspace = workspace_at(tmp_path / "root")
    jobs = []
    for name in ("first", "second"):
        output = workspace.root / "runs" / name
        output.mkdir(parents=True)
        log = MetricsLog(output)
        log.receive(Stepped(1, 1.0, 0.5, 0.5, 1e-4, {}, 9, 9, 0.5, 2**20))
        for step in (0, 1):
            for colour in ("red", "blue"):
                address = thumbnail(Image.new("RGB", (300, 200), colour))
                log.receive(Sampled(step, "What is it?", f"{name} {colour} {step}", (address, HOSTILE, "data:,x")))
        log.close()
        jobs.append(queue.add(workspace, request(workspace, "version", name=name, output=str(output))))
    wait(lambda: all(queue.find(workspace, job.id).state == "finished" for job in jobs))
    shown = "return [...document.querySelectorAll('.card img')].filter((image) => image.naturalWidth === 160).length"
    with running(workspace.root) as board, chromium() as driver:
        driver.get(f"{board.address}/#/runs/{jobs[0].id}")
        eventually(lambda: driver.execute_script(shown) == 2)
        assert texts(driver, ".card > .sample .answer") == ["first red 1", "first blue 1"]
        driver.get(f"{board.address}/#/compare/{'/'.join(job.id for job in jobs)}")
        eventually(lambda: driver.execute_script(shown) == 2)
        assert texts(driver, ".answers .answer") == ["first red 1", "second red 1", "first blue 1", "second blue 1"]
        assert complaints(driver) == []


def test_the_newest_completions_are_a_table_with_their_rewards(tmp_path: pathlib.Path):
    workspace = workspace_at(tmp_path / "root")
    output = workspace.root / "runs/online"
    output.mkdir(parents=True)
    rows = [{"kind": "train", "step": step, "loss": 0.1, "reward": 0.5, "rewards/right/mean": 0.5} for step in (1, 2)]
    (output / "metrics.jsonl").write_text("".join(json.dumps({**row, "seconds": 1}) + "\n" for row in rows))
    log = MetricsLog(output)
    for text, advantage in ((HOSTILE, -1.0), ("eleven", 1.0)):
        fields = {"prompt": "5 + 6", "completion": text, "rewards": {"right": None}, "tokens": 2, "group": 0}
        log.receive(RolledOut(1, [{**fields, "advantage": advantage}]))
    log.close()
    job = queue.add(workspace, request(workspace, "version", output=str(output)))
    wait(lambda: queue.find(workspace, job.id).state == "finished")
    with running(workspace.root) as board, chromium() as driver:
        driver.get(f"{board.address}/#/runs/{job.id}")
        eventually(lambda: "Reward right" in "".join(texts(driver, "figure")))
        press(driver, "Newest completions")
        assert eventually(lambda: texts(driver, "td.answer")) == ["eleven", HOSTILE]
        assert texts(driver, "tbody th") == ["5 + 6"]
        assert complaints(driver) == []


def test_ten_thousand_updates_are_drawn_without_a_stutter(hostile_board):
    board, driver, job = hostile_board
    driver.get(f"{board.address}/#/runs")
    eventually(lambda: texts(driver, ".run"))
    first_view = driver.execute_script("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert first_view < 1000, first_view
    driver.get(f"{board.address}/#/runs/{job.id}")
    driver.refresh()
    eventually(lambda: len(texts(driver, "figure")) >= 6)
    eventually(lambda: "9.77 KiB" in "".join(texts(driver, "figcaption")))  # the memory of the last update
    tasks = driver.execute_script("return window.longTasks")
    print("first view", first_view, "ms; tasks above 50 ms", tasks)
    assert max(tasks, default=0) < 400  # of a page that is being opened, on two cores that others use
    figure = driver.find_element("css selector", "canvas")
    took = driver.execute_script(
        "const began = performance.now(); for (let n = 0; n < 20; n += 1) arguments[0].dispatchEvent("
        "new PointerEvent('pointermove', {clientX: 300 + n, bubbles: true})); return (performance.now() - began) / 20",
        figure,
    )
    assert took < 16, took
    eventually(lambda: any("update" in text for text in texts(driver, ".readout")))


def test_a_chart_is_drawn_over_tokens_and_saved_as_a_table(hostile_board):
    """Smoothed by as many updates as the slider says; the browser keeps the choice."""
    board, driver, job = hostile_board
    driver.get(f"{board.address}/#/runs/{job.id}")
    driver.refresh()
    eventually(lambda: len(texts(driver, "figure")) >= 6)
    automatic = texts(driver, ".chart:first-child .legend")
    assert texts(driver, ".chart:first-child .save button") == ["PNG", "CSV"]
    driver.find_element("css selector", "#chart-x option[value=tokens]").click()
    change = (
        "const range = document.getElementById('chart-span'); range.value = 1; range.dispatchEvent(new Event('input'))"
    )
    driver.execute_script(change)
    eventually(lambda: texts(driver, ".chart-settings output") == ["over 1 update"])
    eventually(lambda: texts(driver, ".chart:first-child .legend") != automatic)
    driver.find_element("id", "chart-log").click()
    driver.execute_script(
        "const real = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { window.saved = blob; return real.call(URL, blob); }"
    )
    press(driver, "CSV")
    table = driver.execute_async_script("window.saved.text().then(arguments[0])").splitlines()
    assert table[0].split(",") == ["tokens", "Loss training (nats per token)", "Loss validation (nats per token)"]
    assert table[1].split(",") == ["9", f"{2 + 1 / 50}", ""]
    assert len(table) == 10_001
    press(driver, "PNG")
    eventually(lambda: driver.execute_script("return window.saved.type") == "image/png")
    driver.refresh()
    eventually(lambda: texts(driver, ".chart-settings output") == ["over 1 update"])
    assert driver.find_element("id", "chart-log").is_selected()
    driver.execute_script("localStorage.clear()")
    assert complaints(driver) == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_from_end_to_end(hostile_board, language: str):
    board, driver, job = hostile_board
    driver.get(f"{board.address}/#/runs")
    eventually(lambda: texts(driver, ".run"))
    driver.find_element("css selector", f"option[value={language}]").click()
    eventually(lambda: LANGUAGES[language] in texts(driver, "nav a"))
    driver.get(f"{board.address}/#/runs/{job.id}")
    eventually(lambda: len(texts(driver, "figure")) >= 6)
    assert driver.find_element("tag name", "html").get_attribute("lang") == language
    text = driver.find_element("tag name", "body").text
    assert "[runs." not in text
    assert "[shared." not in text
    driver.execute_script("localStorage.clear()")


def test_pages_in_both_themes_and_on_a_phone(hostile_board):
    """Screenshots for people, and what a machine can check: nothing is wider than the screen, axe finds nothing."""
    board, driver, job = hostile_board
    IMAGES.mkdir(parents=True, exist_ok=True)
    violations = []
    for name, page in (("runs", "#/runs"), ("run", f"#/runs/{job.id}")):
        for size, (width, height) in {"wide": (1280, 1000), "phone": (390, 844)}.items():
            for dark in (False, True):
                look(driver, width, height, dark=dark)
                driver.get(f"{board.address}/{page}")
                driver.refresh()
                eventually(lambda: texts(driver, ".run") or len(texts(driver, "figure")) >= 6)
                driver.save_screenshot(str(IMAGES / f"{name}-{size}-{'dark' if dark else 'light'}.png"))
                overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert driver.execute_script(overflow) <= 0, (name, size)
                violations += axe(driver)
    look(driver, 1280, 900, dark=False)
    assert violations == []


def test_a_token_is_asked_for(tmp_path: pathlib.Path):
    with running(tmp_path, "--token", "open sesame") as board, chromium() as driver:
        driver.get(f"{board.address}/#/runs")
        field = eventually(lambda: driver.find_element("id", "token"))
        field.send_keys("wrong")
        driver.execute_script("window.dispatchEvent(new Event('signed-out'))")  # another request that was refused
        assert field.get_attribute("value") == "wrong"
        press(driver, "Sign in")
        eventually(lambda: "the token is wrong" in "".join(texts(driver, ".problems")))
        field.clear()
        field.send_keys("open sesame")
        press(driver, "Sign in")
        eventually(lambda: "Nothing was started yet." in "".join(texts(driver, ".empty")))
        board.kill()
        board.start()
        driver.refresh()
        eventually(lambda: texts(driver, ".empty"))  # still signed in
