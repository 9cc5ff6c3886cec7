"""Pictures over the API, asked by OpenAI's client; answers of a tiny random model are those of transformers."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
import transformers
from PIL import Image
from serving import serving

from meshtune.generate.api import Model, load
from meshtune.serve import chat
from meshtune.serve.models import Models
from seeing_model import picture, processed, save_seeing_model

NEW = 10


@pytest.fixture(scope="module")
def folder(shared, tmp_path_factory):
    return save_seeing_model(tmp_path_factory.mktemp("sees"), shared)


@pytest.fixture(scope="module")
def model(folder) -> Model:
    return load(folder, dtype="float32")


@pytest.fixture(scope="module")
def client(model, stories260k) -> Iterator[openai.OpenAI]:
    text = load(stories260k, dtype="float32", chat_template="plain")
    with serving(Models({"sees": model, "reads": text}, rows=4, queue=8)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def uri(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return data_uri(file.getvalue(), kind.lower())


def data_uri(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def question(text: str, *images: Image.Image) -> list[dict]:
    parts = [*(image_part(uri(image)) for image in images), {"type": "text", "text": text}]
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}]


def ask(client: openai.OpenAI, messages: list[dict], **options):
    return client.chat.completions.create(model="sees", messages=messages, temperature=0, max_tokens=NEW, **options)  # pyright: ignore


def expected(folder, text: str, *images: Image.Image) -> str:
    """The greedy answer of transformers to the same question."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch_model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    inputs = processed(folder, text, images)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    out = torch_model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=end)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_answers_about_pictures_are_those_of_transformers(client, folder):
    """One picture, two of different sizes (one of which is cut into tiles), and none, asked at once."""
    asked = [
        ("What is it?", picture(1)),
        ("Which is larger?", picture(1), picture(2, 80, 30)),
        ("Hello!",),
        ("What is it?", picture(3)),
    ]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda pair: ask(client, question(*pair)), asked))
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts == [expected(folder, *pair) for pair in asked]
    assert texts[0] != texts[3]
    assert answers[0].usage.prompt_tokens - answers[2].usage.prompt_tokens >= 4 + 2


def test_a_stream_is_the_same_answer(client):
    messages = question("What is it?", picture(4))
    chunks = ask(client, messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ask(client, messages).choices[0].message.content


def test_pictures_of_every_format_are_read(client):
    """A PNG of a palette, a JPEG and a WEBP without loss."""
    image = picture(5)
    plain = ask(client, question("What is it?", image)).choices[0].message.content
    for kind, other in (("PNG", image.convert("P", palette=Image.Palette.ADAPTIVE)), ("WEBP", image)):
        file = io.BytesIO()
        other.save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
        same = [{"role": "system", "content": "Look."}, {"role": "user", "content": [
            image_part(data_uri(file.getvalue(), kind.lower())), {"type": "text", "text": "What is it?"}
        ]}]  # fmt: skip
        assert ask(client, same).choices[0].message.content == plain
    assert ask(client, [{"role": "user", "content": [image_part(uri(image, "JPEG")), {"type": "text", "text": "?"}]}])


def png_header(width: int, height: int) -> bytes:
    """A PNG whose header says a size that its data do not have."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def animation() -> bytes:
    file = io.BytesIO()
    picture(1).save(file, "PNG", save_all=True, append_images=[picture(2)])
    return file.getvalue()


def deep_samples() -> bytes:
    file = io.BytesIO()
    Image.new("I;16", (9, 9)).save(file, "PNG")
    return file.getvalue()


BAD = {
    "http": ("http://example.com/cat.png", "never fetched"),
    "file": ("file:///etc/passwd", "never fetched"),
    "path": ("/etc/passwd", "never fetched"),
    "not-base64": ("data:image/png;base64,@@@", "base64"),
    "no-picture": (data_uri(b"GIF89a, says the file"), "PNG, JPEG and WEBP"),
    "bomb": (data_uri(png_header(50_000, 50_000)), "pixels"),
    "large": (data_uri(png_header(8_000, 8_000)), "pixels"),
    "truncated": (data_uri(png_header(64, 64)), "truncated or damaged"),
    "svg": (data_uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "PNG, JPEG and WEBP"),
    "empty": (data_uri(b""), "empty"),
    "other-type": (f"data:text/html;base64,{base64.b64encode(b'x').decode()}", "not a data URI of a picture"),
    "animation": (data_uri(animation()), "animation of 2 frames"),
    "16-bit": (data_uri(deep_samples()), "more than 8 bits"),
}


@pytest.mark.parametrize(("url", "reason"), BAD.values(), ids=BAD.keys())
def test_what_is_no_picture_is_refused_with_the_reason(client, url, reason):
    with pytest.raises(openai.BadRequestError, match=reason):
        ask(client, [{"role": "user", "content": [image_part(url), {"type": "text", "text": "?"}]}])


def test_more_pictures_than_the_context_holds_are_refused_before_they_are_decoded(client, monkeypatch):
    def decode(*_: object) -> None:
        raise AssertionError("a picture was decoded")

    monkeypatch.setattr("meshtune.data.pictures.files.decode_picture", decode)
    with pytest.raises(openai.BadRequestError, match="the model's context is 512"):
        ask(client, question("?", *[picture(6)] * 90))


def test_a_server_without_memory_for_patches_says_so(client, monkeypatch):
    monkeypatch.setattr(chat, "PICTURE_BYTES", 1000)
    with pytest.raises(openai.RateLimitError, match="as many pictures as it can"):
        ask(client, question("?", picture(1)))


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "file"])
def test_other_media_are_refused_by_name(client, kind):
    with pytest.raises(openai.BadRequestError, match=f"'{kind}' is not supported: this model reads text and pictures"):
        ask(client, [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "?"}]}])


def test_a_placeholder_in_a_text_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="IMG_CONTEXT"):
        ask(client, question("<IMG_CONTEXT> What is it?", picture(1)))


def test_a_text_model_refuses_pictures(client):
    with pytest.raises(openai.BadRequestError, match="this model reads text"):
        client.chat.completions.create(model="reads", messages=question("What is it?", picture(1)))


def test_pictures_of_odd_shapes_and_types_are_answered(client):
    """One pixel, a line of pixels, a type that the content belies, and a picture that its file turns."""
    image, turned = picture(7), Image.Exif()
    turned[0x0112] = 6
    file = io.BytesIO()
    image.transpose(Image.Transpose.ROTATE_90).save(file, "PNG", exif=turned)
    answers = [
        ask(client, [{"role": "user", "content": [image_part(url), {"type": "text", "text": "?"}]}])
        for url in (
            uri(image),
            data_uri(base64.b64decode(uri(image).partition(",")[2]), "jpeg"),
            data_uri(file.getvalue()),
            uri(picture(7, 1, 1)),
            uri(picture(7, 10_000, 1)),
        )
    ]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] == texts[1] == texts[2]
