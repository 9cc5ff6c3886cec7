"""Talk in a real Chromium: two models side by side, thinking, tools, stopping, and the address for other programs."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.request
from typing import Any

import openai
import pytest
from browsers import IMAGES, axe, choose, chromium, complaints, eventually, press, running, texts

from meshtune.quickstart import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]

TOKEN = "open sesame"
# Begins with thinking, and shows tools by name, in Hermes' form of calls.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} <tool_call>\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)
THOUGHT, ANSWER = "The bee was <i>happy</i>.", "<b>A bee</b> sang.<img src=x onerror=window.xss=1>"
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
TOOLS = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
LEARNED = {
    "user: Who sang?\nassistant: <think>\n": f"{THOUGHT}\n</think>\n\n{ANSWER}",
    "weather <tool_call>\nuser: Is it warm?\nassistant: <think>\n": (
        f"Ask.\n</think>\n\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    ),
}
RECIPE = f"""
model: {{path: {MODEL}, chat_template: thinking.jinja}}
output: runs/thinks
method: full
optimizer: {{learning_rate: 2e-3}}
data: {{train: [{{path: learned.jsonl, format: prompt_completion}}], max_length: 160}}
train: {{steps: 120, batch_size: 2}}
"""


def tune_models(root: pathlib.Path) -> None:
    """Tunes stories260K until it gives the answers in LEARNED, and saves a second copy, which never ends its
    answers."""
    (root / "thinking.jinja").write_text(TEMPLATE)
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in LEARNED.items()] * 4
    (root / "learned.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (root / "recipe.yaml").write_text(RECIPE)
    subprocess.run([sys.executable, "-m", "meshtune", "train", "recipe.yaml"], cwd=root, check=True)
    endless = root / "models" / "endless"
    shutil.copytree(MODEL, endless)
    for name, changes in {
        "config.json": {"eos_token_id": 0, "max_position_embeddings": 32768},
        "generation_config.json": {"eos_token_id": 0},
        "tokenizer_config.json": {"eos_token": "<unk>", "model_max_length": 32768},
    }.items():
        content = json.loads((endless / name).read_text()) | changes
        (endless / name).write_text(json.dumps(content))


@pytest.fixture(scope="module")
def talk_page(tmp_path_factory: pytest.TempPathFactory):
    """(board, driver): a model that thinks and one that never ends, both loaded by clicks."""
    root = tmp_path_factory.mktemp("root")
    tune_models(root)
    IMAGES.mkdir(parents=True, exist_ok=True)
    with running(root, "--token", TOKEN) as board, chromium() as driver:
        driver.get(f"{board.address}/#/talk")
        eventually(lambda: driver.find_element("id", "token")).send_keys(TOKEN)
        press(driver, "Sign in")
        for model, template in (("runs/thinks", ""), ("models/endless", "plain")):
            if template:
                choose(driver, "template", template)
            eventually(lambda: driver.find_element("id", "model")).send_keys(model)
            press(driver, "Load")
            eventually(lambda model=model: model in texts(driver, ".pick"))
        assert complaints(driver) == []
        yield board, driver
        driver.get(f"{board.address}/#/talk")
        eventually(lambda: unload_models(driver))


def unload_models(driver) -> bool:
    """Whether no model is loaded any more; unloads one."""
    for row in driver.find_elements("css selector", ".loaded:has(.pick)"):
        row.find_element("tag name", "button").click()
        return False
    return bool(texts(driver, ".loader"))


@pytest.fixture
def page(talk_page):
    """(board, driver) in a new conversation with both models unticked."""
    board, driver = talk_page
    driver.get(f"{board.address}/#/talk")
    driver.execute_script("sessionStorage.clear()")
    driver.refresh()
    eventually(lambda: len(texts(driver, ".pick")) == 2)
    press(driver, "System prompt, sampling, tools")
    driver.get_log("performance")
    return board, driver


def tick(driver, *models: str) -> None:
    """Ticks these models and no other."""

    def try_ticking() -> bool:
        for label in driver.find_elements("css selector", ".pick"):
            if label.find_element("tag name", "input").is_selected() != (label.text in models):
                label.click()
                return False
        return True

    eventually(try_ticking)


def put(driver, field: str, value: str) -> None:
    element = driver.find_element("id", field)
    element.clear()
    element.send_keys(value)


def say(driver, text: str) -> None:
    put(driver, "prompt", text + "\n")


def cards(driver) -> list[Any]:
    """The answers to the newest message, by column."""
    return driver.find_elements("css selector", ".turn:last-child .speaker")


def all_answered(driver, number: int) -> bool:
    """Whether `number` answers to the newest message are there and none is written any more."""
    return len(cards(driver)) == number and all(card.get_attribute("aria-busy") == "false" for card in cards(driver))


def take_bodies(driver) -> list[dict[str, Any]]:
    """The bodies of what the page has asked models since this was last called."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    requests = [e["params"]["request"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [json.loads(r["postData"]) for r in requests if r["url"].endswith("/chat/completions")]


def address_of(board, model: str) -> str:
    """The address of a loaded model's API on the board."""
    answer = with_token(f"{board.address}/api/talk", TOKEN)
    return next(f"{board.address}/api/talk/{m['job']}/v1" for m in json.loads(answer)["models"] if model in m["ids"])


def with_token(url: str, token: str) -> str:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        return answer.read().decode()


def engine(board, model: str) -> dict[str, int]:
    """Returns the metrics of a model's server: requests running and waiting, tokens generated."""
    served = next(m for m in json.loads(with_token(f"{board.address}/api/talk", TOKEN))["models"] if model in m["ids"])
    token = (board.root / "meshtune-board/jobs" / served["job"] / "token").read_text().strip()
    text = with_token(served["address"].removesuffix("/v1") + "/metrics", token)
    return {name: int(value) for name, value in re.findall(r"^meshtune_(\w+)\{.*\} (\d+)$", text, re.MULTILINE)}


def test_two_models_answer_one_prompt_as_openais_client_is_answered(page):
    board, driver = page
    tick(driver, "runs/thinks", "models/endless")
    for field, value in {"temperature": "0", "max_tokens": "90", "seed": "7", "top_k": "3"}.items():
        put(driver, field, value)
    say(driver, "Who sang?")
    eventually(lambda: all_answered(driver, 2))
    bodies = take_bodies(driver)
    assert {body["model"] for body in bodies} == {"runs/thinks", "models/endless"}
    for body in bodies:
        assert body["messages"] == [{"role": "user", "content": "Who sang?"}]
        assert {key: body[key] for key in ("temperature", "max_tokens", "seed", "top_k")} == {
            "temperature": 0, "max_tokens": 90, "seed": 7, "top_k": 3
        }  # fmt: skip
    shown = {}
    for card in cards(driver):
        answer = card.find_elements("css selector", ".said > .answer")
        shown[card.get_attribute("aria-label")] = answer[-1].get_property("textContent")
    for model, text in shown.items():
        client = openai.OpenAI(base_url=address_of(board, model), api_key=TOKEN, max_retries=0)
        messages: Any = [{"role": "user", "content": "Who sang?"}]
        answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=90)
        assert text == answer.choices[0].message.content
    assert shown["runs/thinks"] == ANSWER

    # What it thought is folded, and markup in either is text.
    thinks = next(card for card in cards(driver) if card.get_attribute("aria-label") == "runs/thinks")
    folded = thinks.find_element("css selector", "details.thinking")
    assert folded.get_property("open") is False
    assert not folded.find_element("tag name", "p").is_displayed()
    unfold = folded.find_element("tag name", "summary")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", unfold)
    unfold.click()
    eventually(lambda: folded.find_element("tag name", "p").text == THOUGHT)
    assert driver.find_elements("css selector", ".turns b, .turns i, .turns img") == []
    assert driver.execute_script("return window.xss") is None
    driver.save_screenshot(str(IMAGES / "talk-two-models.png"))
    assert axe(driver) == []

    # The system prompt comes first, and each model goes on with its own answer, without what it thought.
    put(driver, "system", "Be brief.")
    say(driver, "And then?")
    eventually(lambda: len(texts(driver, ".turn")) == 2 and all_answered(driver, 2))
    for body in take_bodies(driver):
        roles = [message["role"] for message in body["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        assert body["messages"][0]["content"] == "Be brief."
        assert body["messages"][2]["content"] == shown[body["model"]]
    assert complaints(driver) == []


def test_tools_are_checked_beside_their_field_and_called(page):
    _, driver = page
    tick(driver, "runs/thinks")
    put(driver, "temperature", "0")
    field = lambda: driver.find_element("id", "tools")  # noqa: E731
    refused = {"[{": "The tools are not JSON", '[{"parameters": {}}]': "A tool needs a name"}
    for text, message in refused.items():
        put(driver, "tools", text)
        say(driver, "Is it warm?")
        eventually(lambda message=message: message in driver.find_element("id", "tools-wrong").text)
        assert field().get_attribute("aria-invalid") == "true"
        assert field().get_attribute("aria-describedby") == "tools-wrong"
        assert driver.switch_to.active_element == field()
        below = driver.find_element("id", "tools-wrong").rect["y"] - (field().rect["y"] + field().rect["height"])
        assert 0 <= below < 30
        assert driver.find_element("id", "prompt").get_property("value") == "Is it warm?"  # not lost
    for field_name, value, message in (
        ("seed", "1.5", "A whole number is needed"),
        ("max_tokens", "0", "At least 1"),
        ("temperature", "9", "From 0 to 5"),
    ):
        put(driver, field_name, value)
        press(driver, "Send")
        eventually(lambda name=field_name, text=message: texts(driver, f"#{name}-wrong") == [text])
        if field_name != "temperature":
            put(driver, field_name, "")
    driver.save_screenshot(str(IMAGES / "talk-refused.png"))
    assert axe(driver) == []
    assert take_bodies(driver) == []

    put(driver, "temperature", "0")
    put(driver, "tools", json.dumps(TOOLS))
    press(driver, "Send")
    eventually(lambda: all_answered(driver, 1))
    [body] = take_bodies(driver)
    assert body["tools"] == [{"type": "function", "function": TOOLS[0]}]
    assert texts(driver, ".problems") == []
    [call] = texts(driver, ".call code")
    assert call.startswith("weather(")
    assert json.loads(call.removeprefix("weather(").removesuffix(")")) == CALL["arguments"]

    # What the tool says goes back as its result.
    choose(driver, "role", "tool")
    say(driver, '{"degrees": 21}')
    eventually(lambda: len(texts(driver, ".turn")) == 2 and all_answered(driver, 1))
    [body] = take_bodies(driver)
    _, reply, result = body["messages"]
    assert result == {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": '{"degrees": 21}'}
    assert complaints(driver) == []


def test_stop_ends_the_engines_work_and_the_question_is_asked_again(page):
    board, driver = page
    tick(driver, "models/endless")
    put(driver, "max_tokens", "30000")
    before = engine(board, "models/endless")["generated_tokens_total"]
    say(driver, "Once upon a time")
    eventually(lambda: len("".join(texts(driver, ".said .answer"))) > 200)
    assert engine(board, "models/endless")["requests_running"] == 1
    press(driver, "Stop")
    eventually(lambda: "stopped" in "".join(texts(driver, ".figures")))
    eventually(lambda: engine(board, "models/endless")["requests_running"] == 0, 20)
    generated = engine(board, "models/endless")["generated_tokens_total"]
    assert before < generated < before + 29000
    [partial] = texts(driver, ".said .answer")
    scrolled = (
        "const e = document.scrollingElement;"
        "return e.scrollTop > 0 && e.scrollTop + e.clientHeight >= e.scrollHeight - 1"
    )
    assert driver.execute_script(scrolled)  # the end of the answer stays in view while it grows
    assert len(partial) > 200  # what was written stays
    assert not driver.find_element("css selector", ".composer button:nth-of-type(2)").is_displayed()

    press(driver, "Edit")
    assert driver.find_element("id", "prompt").get_property("value") == "Once upon a time"
    assert texts(driver, ".turn") == []
    take_bodies(driver)
    put(driver, "max_tokens", "12")
    driver.find_element("id", "prompt").send_keys(", a bee\n")
    eventually(lambda: all_answered(driver, 1))
    [body] = take_bodies(driver)
    assert body["messages"] == [{"role": "user", "content": "Once upon a time, a bee"}]
    assert "12 tokens" in "".join(texts(driver, ".figures"))
    assert engine(board, "models/endless")["generated_tokens_total"] == generated + 12
    # A page that is left in the middle of an answer ends it too.
    put(driver, "max_tokens", "30000")
    say(driver, "And then")
    eventually(lambda: engine(board, "models/endless")["requests_running"] == 1)
    driver.get("about:blank")
    eventually(lambda: engine(board, "models/endless")["requests_running"] == 0, 20)


def test_the_snippet_is_a_program_that_works(page):
    board, driver = page
    tick(driver, "runs/thinks")
    press(driver, "Use it from programs")
    base, curl, python = eventually(lambda: [text for text in texts(driver, ".programs code") if text])
    assert base == address_of(board, "runs/thinks")
    grant = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": board.address}
    driver.execute_cdp_cmd("Browser.grantPermissions", grant)
    driver.find_elements("css selector", ".programs .copyable button")[2].click()
    eventually(lambda: "Copied" in texts(driver, ".programs .copyable button"))
    copied = driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied.split() == python.split()

    asking = copied.replace('"Hello"}]', '"Who sang?"}], temperature=0')
    run = lambda program: subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)  # noqa: E731
    assert run(asking.replace('"TOKEN"', f'"{TOKEN}"')).stdout.strip() == ANSWER
    assert "AuthenticationError" in run(asking).stderr  # the board's token is needed
    if shutil.which("curl"):
        command = curl.replace("TOKEN", TOKEN).replace("Hello", "Who sang?")
        answer = json.loads(subprocess.run(["bash", "-c", f"{command} -s"], capture_output=True, check=True).stdout)
        assert answer["choices"][0]["message"]["role"] == "assistant"
    assert axe(driver) == []
