"""Model, Data and Recipe in a real Chromium: from a model and a file of chats to runs that end, by clicks only."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import pytest
from browsers import IMAGES, axe, chromium, complaints, eventually, look, press, requests_of, running, texts
from clicks import SHORT, follow, jsonl, pick_model, put, run_ends, send_file, yaml
from yaml import safe_load as read_yaml

from meshtune.board import app
from meshtune.quickstart import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]

QUESTIONS = [f"What did the {animal} sing?" for animal in ("bee", "cow", "cat", "dog", "owl", "pig", "hen", "fox")]
ANSWERS = [f"It sang la la la, {number} times." for number in range(8)]
HOSTILE = '<img src=x onerror="window.xss=1"><script>window.xss=1</script>'
HOSTILE_NAME = "<img src=x onerror=window.xss=1> & 'a' \"b\".jsonl"


def chats(path: pathlib.Path) -> pathlib.Path:
    """A file of chats of one question and its answer each."""
    roles = ("user", "assistant")
    turns = [
        [{"role": role, "content": text} for role, text in zip(roles, chat, strict=True)]
        for chat in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    return jsonl(path, [{"messages": messages} for messages in turns])


def test_chats_are_uploaded_seen_and_tuned_on_by_clicks_alone(tmp_path: pathlib.Path):
    root = tmp_path / "root"
    root.mkdir()
    with running(root) as board, chromium() as driver:
        driver.get(board.address)
        pick_model(driver, str(MODEL))
        put(driver, "model.chat_template", "plain")
        send_file(driver, chats(tmp_path / "chats.jsonl"))
        eventually(lambda: "format: messages, detected" in "".join(texts(driver, ".source-card")))
        trained = eventually(lambda: texts(driver, ".document mark.trained"))
        prompts = texts(driver, ".document .prompt")
        assert trained
        for answer, mark in zip(ANSWERS, trained, strict=False):
            assert answer in mark
        assert not any(question in mark for question in QUESTIONS for mark in trained)
        assert any(QUESTIONS[0] in prompt for prompt in prompts)
        assert "8 records" in "".join(texts(driver, ".source-card"))

        driver.find_element("link text", "To the recipe").click()
        press(driver, "LoRA")
        put(driver, "output", "runs/chats")
        put(driver, "train.steps", "x")
        eventually(lambda: texts(driver, "[data-path='train.steps'] .wrong")[0])
        for path, value in SHORT.items():
            put(driver, path, value)
        eventually(lambda: texts(driver, ".verdict.fits"))
        tensors = run_ends(driver, root, "runs/chats")
        assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
        assert complaints(driver) == []


def test_preferences_are_tuned_on_by_clicks_alone(tmp_path: pathlib.Path):
    root = tmp_path / "root"
    pairs = zip(QUESTIONS, ANSWERS, strict=True)
    records = [{"prompt": prompt, "chosen": f" {answer}", "rejected": " No."} for prompt, answer in pairs]
    root.mkdir()
    with running(root) as board, chromium() as driver:
        driver.get(board.address)
        pick_model(driver, str(MODEL))
        press(driver, "DPO")
        eventually(lambda: "kind: dpo" in yaml(driver))
        put(driver, "model.chat_template", "plain")
        send_file(driver, jsonl(tmp_path / "pairs.jsonl", records))
        eventually(lambda: "format: preference, detected" in "".join(texts(driver, ".source-card")))
        eventually(lambda: any("No." in mark for mark in texts(driver, ".document mark.trained")))
        driver.find_element("link text", "To the recipe").click()
        put(driver, "output", "runs/pairs")
        for path, value in SHORT.items():
            put(driver, path, value)
        tensors = run_ends(driver, root, "runs/pairs")
        assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
        eventually(lambda: any("Reward margin" in text for text in texts(driver, "figcaption")))
        assert complaints(driver) == []


def test_rewards_are_added_changed_and_removed_by_clicks(tmp_path: pathlib.Path):
    root = tmp_path / "root"
    root.mkdir()
    with running(root) as board, chromium() as driver:
        driver.get(board.address)
        pick_model(driver, str(MODEL))
        press(driver, "GRPO")
        eventually(lambda: "kind: equals" in yaml(driver))
        follow(driver, "recipe")
        put(driver, "rewards.0.weight", "2")
        press(driver, "Add an entry")
        kind = eventually(lambda: driver.find_element("css selector", "select[aria-label='Kind of entry 2']"))
        assert kind.get_property("value") == "function"
        eventually(lambda: "rewards.1" in texts(driver, "[data-path=rewards] > .wrong")[0])  # no function yet
        kind.find_element("css selector", "option[value=length]").click()
        eventually(lambda: "kind: length" in yaml(driver))
        put(driver, "rewards.1.target", "40")
        assert axe(driver) == []
        recipe = read_yaml(yaml(driver))
        expected = [{"kind": "equals", "column": "answer", "weight": 2}, {"kind": "length", "target": 40}]
        assert recipe["rewards"] == expected
        eventually(lambda: driver.find_element("css selector", "button[aria-label='Remove entry 1']")).click()
        eventually(lambda: read_yaml(yaml(driver))["rewards"] == expected[1:])
        assert complaints(driver) == []


FOREIGN = f"""
model_name_or_path: {MODEL}
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: all
dataset: chats
template: default
cutoff_len: 96
output_dir: saves/imported
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 3.0e-4
max_steps: 7
"""


def test_a_llama_factory_recipe_is_imported_by_clicks(tmp_path: pathlib.Path):
    root, file = tmp_path / "root", tmp_path / "foreign.yaml"
    chats(root / "data" / "chats.jsonl")
    registry = {"chats": {"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}}}
    registry["chats"] |= {
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    }
    (root / "data" / "dataset_info.json").write_text(json.dumps(registry))
    file.write_text(FOREIGN)
    with running(root) as board, chromium() as driver:
        driver.get(f"{board.address}/#/recipe")
        press(driver, "Import…")
        eventually(lambda: driver.find_element("id", "foreign-file")).send_keys(str(file))
        eventually(lambda: "lora_rank: 4" in driver.find_element("id", "foreign").get_property("value"))
        press(driver, "Translate")
        eventually(lambda: any(text.startswith("Translated") for text in texts(driver, "dialog summary")))
        assert axe(driver) == []
        press(driver, "Use this recipe")
        expected = {
            "method.rank": "4",
            "data.max_length": "96",
            "train.batch_size": "8",
            "train.steps": "7",
            "output": "saves/imported",
        }
        for path, value in expected.items():
            field = f"[data-path='{path}'] input"
            eventually(
                lambda field=field, value=value: (
                    driver.find_element("css selector", field).get_property("value") == value
                )
            )
        follow(driver, "data")
        eventually(lambda: any("It sang" in mark for mark in texts(driver, ".document mark.trained")))
        assert complaints(driver) == []


def test_a_second_language_from_the_navigation_to_the_end_of_a_run(tmp_path: pathlib.Path):
    root = tmp_path / "root"
    root.mkdir()
    labels = json.loads((pathlib.Path(app.__file__).parent / "page/text/ru.json").read_text(encoding="utf-8"))
    with running(root) as board, chromium() as driver:
        driver.get(board.address)
        eventually(lambda: driver.find_element("css selector", "option[value=ru]")).click()
        eventually(lambda: labels["model"]["title"] in texts(driver, "nav a"))
        shown = []
        for page in ("data", "recipe", "model"):
            follow(driver, page, labels[page]["title"])
            eventually(lambda page=page: driver.title.startswith(labels[page]["title"]))
            shown.append(eventually(lambda: driver.find_element("tag name", "main").text))
        pick_model(driver, str(MODEL))
        put(driver, "model.chat_template", "plain")
        send_file(driver, chats(tmp_path / "чаты.jsonl"))
        eventually(lambda: texts(driver, ".document mark.trained"))
        shown.append(driver.find_element("tag name", "main").text)
        driver.find_element("link text", labels["data"]["use"]).click()
        put(driver, "output", "runs/чаты")
        for path, value in SHORT.items():
            put(driver, path, value)
        assert eventually(lambda: texts(driver, ".verdict.fits strong")) == [labels["plan"]["fits"]]
        choices = eventually(lambda: texts(driver, ".choices td"))
        assert "0.0002 по умолчанию для метода lora" in choices
        assert any(
            re.fullmatch(r"токенов: \d+ auto: \d+ МиБ логитов одновременно на устройстве", text) for text in choices
        )
        shown.append(driver.find_element("tag name", "main").text)
        assert run_ends(driver, root, "runs/чаты")
        assert texts(driver, ".head .state") == [labels["state"]["finished"]]
        assert labels["kind"]["train"] in driver.find_element("css selector", ".head").text
        shown.append(driver.find_element("tag name", "main").text)
        # A key without a text is shown in brackets.
        assert re.findall(r"\[[a-z]+\.[a-z_.]+\]", "\n".join(shown)) == []
        assert complaints(driver) == []


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory):
    """(board, driver): a recipe whose data are hostile by name, column and content, over a hostile model's folder."""
    root = tmp_path_factory.mktemp("root")
    jsonl(root / "data" / HOSTILE_NAME, [{"prompt": HOSTILE, "completion": f" {HOSTILE}", HOSTILE: HOSTILE}] * 8)
    (root / HOSTILE_NAME).mkdir()
    (root / HOSTILE_NAME / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    (root / HOSTILE_NAME / "model.safetensors").write_text(HOSTILE)
    (root / f"{HOSTILE_NAME}.yaml").write_text("seed: 1\n")
    content = {
        "model": {"path": str(MODEL), "chat_template": "plain"},
        "output": HOSTILE_NAME + "/run",
        "data": {"max_length": 512},
    }
    content["data"]["train"] = [{"path": f"data/{HOSTILE_NAME}"}]
    with running(root) as board, chromium() as driver:
        driver.get(board.address)
        eventually(lambda: texts(driver, "nav a"))
        driver.execute_script("localStorage.setItem('recipe', arguments[0])", json.dumps(content))
        yield board, driver


def harmless(driver) -> bool:
    """Checks that no script of the data has run or made an element, and that the policy had nothing to refuse."""
    elements = driver.find_elements("css selector", "main img, main script, main iframe, dialog img")
    return driver.execute_script("return window.xss") is None and elements == [] and complaints(driver) == []


def test_hostile_data_names_and_recipes_stay_text(hostile, tmp_path: pathlib.Path):
    board, driver = hostile
    main = lambda: driver.find_element("tag name", "main").text  # noqa: E731
    driver.get(f"{board.address}/#/data")
    eventually(lambda: any(HOSTILE in mark for mark in texts(driver, ".document mark.trained")))
    assert f"data/{HOSTILE_NAME}" in texts(driver, ".source-card legend")
    press(driver, "First records")
    eventually(lambda: HOSTILE in texts(driver, ".record dt code"))
    send_file(driver, jsonl(tmp_path / HOSTILE_NAME, [{HOSTILE: HOSTILE}]))
    eventually(lambda: "Say which of them is the question" in main())
    press(driver, "Formats and their fields")
    eventually(lambda: "no format fits" in main())
    press(driver, "First records")
    assert harmless(driver)

    driver.get(f"{board.address}/#/recipe")
    eventually(lambda: HOSTILE_NAME in main() + yaml(driver))
    eventually(lambda: any(HOSTILE_NAME in text for text in texts(driver, "option")))
    put(driver, "train.steps", HOSTILE)
    eventually(lambda: HOSTILE[:40] in "".join(texts(driver, "[data-path='train.steps'] .wrong")))
    press(driver, "Import…")
    eventually(lambda: driver.find_element("id", "foreign")).send_keys(
        f"model_name_or_path: {HOSTILE_NAME}\nstage: sft\n{HOSTILE}: 1\n"
    )
    press(driver, "Translate")
    eventually(lambda: texts(driver, "dialog :is(summary, .problems)"))
    press(driver, "Cancel")
    assert harmless(driver)

    driver.get(f"{board.address}/#/model")
    entry = eventually(
        lambda: [item for item in driver.find_elements("css selector", ".local") if HOSTILE_NAME in item.text]
    )[0]
    entry.find_element("tag name", "button").click()
    eventually(lambda: texts(driver, ".local .models"))
    driver.find_element("id", "model-search").send_keys("llama")  # draws the hub's list anew, and not this one
    assert texts(driver, ".local .models")
    driver.find_element("id", "model-path").send_keys(HOSTILE)
    press(driver, "Memory here")
    eventually(lambda: texts(driver, ".problems, section:first-of-type .models"))
    assert harmless(driver)


def test_pages_in_both_themes_and_on_a_phone(tmp_path: pathlib.Path):
    """Screenshots for people, and what a machine can check: nothing is wider than the screen, axe finds nothing."""
    root = tmp_path / "root"
    chats(root / "data" / "chats.jsonl")
    shutil.copytree(MODEL, root / "models" / "stories260K")
    IMAGES.mkdir(parents=True, exist_ok=True)
    content = {
        "model": {"path": "models/stories260K", "chat_template": "plain"},
        "output": "runs/chats",
        "data": {"train": "data/chats.jsonl"},
    }
    content["data"] |= {"max_length": 128, "validation": 2}
    ready_marks = {"model": ".models .held", "data": "mark.trained", "recipe": ".plan:not(.stale) .facts"}
    ready_marks |= dict.fromkeys(("compare", "talk", "evaluate", "export"), "main h1")
    violations = []
    with running(root) as board, chromium() as driver:
        driver.get(board.address)
        eventually(lambda: texts(driver, "nav a"))
        driver.execute_script("localStorage.setItem('recipe', arguments[0])", json.dumps(content))
        for page, ready in ready_marks.items():
            driver.get(f"{board.address}/#/{page}")
            eventually(lambda ready=ready: texts(driver, ready))
            for size, (width, height) in {"wide": (1280, 1000), "phone": (390, 844)}.items():
                for dark in (False, True):
                    look(driver, width, height, dark=dark)
                    eventually(lambda: driver.execute_script("return document.getAnimations().length === 0"))
                    driver.save_screenshot(str(IMAGES / f"{page}-{size}-{'dark' if dark else 'light'}.png"))
                    wide = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
                    violations += [f"{page} {size}: wider than the screen"] if driver.execute_script(wide) else []
                    violations += [f"{page} {size} {dark}: {violation}" for violation in axe(driver)]
            for dark in (False, True) if page == "recipe" else ():
                look(driver, 1280, 1000, dark=dark)
                # As while it is planned anew:
                driver.execute_script("document.querySelector('.plan').classList.add('stale')")
                driver.save_screenshot(str(IMAGES / f"{page}-stale-{'dark' if dark else 'light'}.png"))
                violations += [f"stale plan {dark}: {violation}" for violation in axe(driver)]
    assert violations == []


def test_keys_are_explained_and_found_in_another_language_and_in_english(tmp_path: pathlib.Path):
    translated = json.loads((pathlib.Path(app.__file__).parent / "page/text/help/zh.json").read_text(encoding="utf-8"))
    with running(tmp_path) as board, chromium() as driver:
        driver.get(f"{board.address}/#/recipe")
        eventually(lambda: driver.find_element("id", "search"))
        assert not [address for address in requests_of(driver) if "text/help" in address]
        driver.find_element("css selector", "option[value=zh]").click()
        eventually(lambda: driver.find_element("tag name", "html").get_attribute("lang") == "zh")
        for query in ("一阶矩", "first moment"):
            search = eventually(lambda: driver.find_element("id", "search"))
            search.clear()
            search.send_keys(query)
            field = "[data-path='optimizer.beta1']"
            help_text = translated["keys"]["adamw and its variants, lion: decay of the first moment."]
            eventually(lambda field=field, text=help_text: texts(driver, f"{field} .help[lang=zh]") == [text])
            assert [
                element.get_attribute("data-path")
                for element in driver.find_elements("css selector", ".all .field")
                if element.is_displayed()
            ] == ["optimizer.beta1"]
        assert complaints(driver) == []
