"""Pictures in messages, in the Python API, in chats and on the command line."""

from __future__ import annotations

import base64
import io
import pathlib

import pytest

from command import run
from meshtune.errors import UserError
from meshtune.generate.api import Model, load
from seeing_model import picture, save_seeing_model

NEW = 8


@pytest.fixture(scope="module")
def model(shared, tmp_path_factory) -> Model:
    return load(save_seeing_model(tmp_path_factory.mktemp("sees"), shared), dtype="float32")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("pictures") / "1.png"
    picture(1).save(path)
    return path


def question(*images: object, text: str = "What is it?") -> list[dict[str, object]]:
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def test_a_picture_is_a_path_bytes_a_data_uri_or_an_image(model, file):
    content = file.read_bytes()
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    forms = [str(file), file, content, uri, picture(1)]
    prompts = [question(form) for form in forms]
    prompts.append([{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What is it?"}
    ]}])  # fmt: skip
    answers = model.generate(prompts, max_tokens=NEW)
    assert len(set(answers)) == 1
    assert model.generate(question(picture(2)), max_tokens=NEW) != answers[0]


def test_a_chat_remembers_its_pictures(model, file):
    """The second turn is answered as the whole conversation is, and the picture is in the history."""
    chat = model.chat(max_tokens=NEW)
    first = chat.send("What is it?", [file])
    second = chat.send("And now?")
    turns = [*question(file), {"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
    assert second == model.generate(turns, max_tokens=NEW)
    chat.reset()
    assert chat.send("And now?") != second


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("http://example.com/cat.png", "never fetched"),
        ("/nowhere/cat.png", "cannot be read"),
        (b"no picture", "PNG, JPEG and WEBP"),
        (3, "no int"),
    ],
    ids=["http", "missing", "damaged", "number"],
)
def test_what_is_no_picture_is_refused(model, image, reason):
    with pytest.raises(UserError, match=reason):
        model.generate(question(image), max_tokens=NEW)


def test_other_parts_and_placeholders_are_refused(model):
    with pytest.raises(UserError, match="neither text nor a picture"):
        model.generate([{"role": "user", "content": [{"type": "video"}]}])
    with pytest.raises(UserError, match="IMG_CONTEXT"):
        model.generate(question(picture(1), text="<IMG_CONTEXT>"))


def test_a_text_model_refuses_pictures(stories260k, file):
    text = load(stories260k, dtype="float32", chat_template="plain")
    with pytest.raises(UserError, match="this model reads text only"):
        text.generate(question(file))
    with pytest.raises(UserError, match="this model reads text only"):
        text.chat().send("What is it?", [file])


def test_the_command_line_takes_pictures(model, file, monkeypatch):
    answer = model.generate(question(file), max_tokens=NEW)
    options = [str(model.directory), "--max-tokens", NEW, "--dtype", "float32"]
    done = run("generate", *options, "--image", file, "-p", "What is it?")
    assert done.stdout == f"{answer}\n"
    done = run("generate", *options, "--image", "/nowhere/cat.png", "-p", "What is it?")
    assert done.returncode == 2
    assert "--image /nowhere/cat.png" in done.stderr
    lines = f"/image /nowhere/cat.png\n/image {file}\nWhat is it?\n/exit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    done = run("chat", *options, "--temperature", 0)
    assert "cannot be read" in done.stdout
    assert answer in done.stdout
