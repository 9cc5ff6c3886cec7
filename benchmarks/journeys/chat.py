"""One request to /v1/chat/completions through the ASGI application, to the first token of its stream; a small model.

    python tests/test_journeys.py benchmarks/journeys/chat.py

That runs this file, which answers one request so that the programs are compiled, and then traces `work()`: the
functions of Meshtune that the next request calls, in any thread.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
from typing import Any

import jax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from meshtune.families import model_spec
from meshtune.generate.api import Model
from meshtune.generate.engine import Engine
from meshtune.model.compute import Compute
from meshtune.model.spec import init_params
from meshtune.serve.app import create_app
from meshtune.serve.models import Models

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BODY = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "stream": True, "temperature": 0}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: n for n, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})  # pyright: ignore[reportArgumentType]
    fast.chat_template = TEMPLATE
    return fast


def small_model() -> Model:
    """A Llama of random weights."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    spec = model_spec(config.to_dict())
    params = init_params(spec, jax.random.key(0))
    return Model(Engine(params, spec, Compute(), resident=True), pathlib.Path(), lambda: tokenizer)


async def first_token(app: Any) -> str:
    """Sends the request, and returns the first text of the answer."""
    content, begun, arrived = json.dumps(BODY).encode(), asyncio.Event(), asyncio.Queue[str]()

    async def receive() -> dict[str, Any]:
        if begun.is_set():
            await asyncio.Future()
        begun.set()
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        for line in message.get("body", b"").decode().splitlines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                if choice["delta"].get("content"):
                    arrived.put_nowait(choice["delta"]["content"])

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions",
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80), "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    }  # fmt: skip
    request = asyncio.create_task(app(scope, receive, send))
    text = asyncio.create_task(arrived.get())
    await asyncio.wait({request, text}, return_when=asyncio.FIRST_COMPLETED)
    request.cancel()
    assert text.done(), request.exception()
    return text.result()


def models_of(model: Model) -> Models:
    """The models of a server that has no other."""
    return Models({"small": model}, rows=2, queue=2)


async def serve_once(models: Models) -> str:
    """The first token of a server that starts, answers and ends."""
    app = create_app(models)
    async with app.router.lifespan_context(app):
        return await first_token(app)


MODEL = small_model()
asyncio.run(serve_once(models_of(MODEL)))  # compiles the programs, and measures the chat template
MODELS = models_of(MODEL)


def work() -> None:
    """One request to its first token; the server's start and end are part of it."""
    print(repr(asyncio.run(serve_once(MODELS))))
