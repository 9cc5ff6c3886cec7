"""Damages files and hands them to a reader, again and again: `python fuzz.py READER SEED CASES SECONDS`.

Each case is a function of reader, seed and number, so that a failure comes back. Right is a result or a UserError (of a
request: an ApiError), soon and in little memory; all else is printed as a line of JSON.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import meshtune
from meshtune.errors import UserError

MODEL = pathlib.Path(meshtune.__file__).parent / "quickstart/model"
MEMORY, CASE_SECONDS = 8 << 30, 20
NASTY: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    255,
    10**6,
    10**9,
    2**31,
    2**32,
    2**63,
    2**64,
    -(2**63),
    10**300,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "null",
    "\x00",
    "\x1b[2J",
    "\ud800",
    "../../etc/passwd",
    "a" * 5000,
    "{{ 1 }}",
    "(a+)+$",
    [],
    {},
    [[]],
    [None],
    [1],
    ["x"],
    {"a": 1},
    {"": {}},
    [[[[[[[[]]]]]]]],
]


def change(value: Any, rng: random.Random) -> Any:
    """A JSON value with one place of it replaced, removed, doubled or added to."""
    value = copy.deepcopy(value)
    places = [(None, None)]
    waiting = [value]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
        for key in keys:
            places.append((node, key))
            waiting.append(node[key])
    node, key = rng.choice(places)
    if node is None:
        return rng.choice(NASTY) if rng.random() < 0.1 else value
    match rng.randrange(5):
        case 0 if isinstance(node, dict):
            del node[key]
        case 1 if isinstance(node, dict):
            node[f"{key}_" if rng.random() < 0.5 else "x"] = rng.choice(NASTY)
        case 2 if isinstance(node, list):
            node.insert(key, copy.deepcopy(rng.choice([node[key], *NASTY])))
        case 3:
            donor, name = rng.choice(places[1:])
            with contextlib.suppress(LookupError):
                node[key] = copy.deepcopy(donor[name])
        case _:
            node[key] = copy.deepcopy(rng.choice(NASTY))
    return value


def damage(content: bytes, rng: random.Random) -> bytes:
    """Bytes with one place of them flipped, cut, removed, doubled, or overwritten by a number or a word."""
    at = rng.randrange(len(content) + 1)
    size = rng.choice([1, 2, 8, 100])
    word = rng.choice(
        [
            b"\x00",
            b"\xff",
            b"[" * 300,
            b"{" * 300,
            b'"',
            b"\n",
            b"9" * 5000,
            b"\\u0000",
            b"\xed\xa0\x80",
            struct.pack("<Q", 2**64 - 1),
            struct.pack("<Q", 2**63),
            struct.pack("<I", 2**32 - 1),
            struct.pack("<Q", 0),
            b"&a [*a]",
            b"!!python/object:os.system",
        ]
    )
    match rng.randrange(6):
        case 0 if at < len(content):
            return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        case 1:
            return content[:at]
        case 2:
            return content[:at] + content[at + size :]
        case 3:
            return content[: at + size] + content[at:]
        case 4:
            return content[:at] + word + content[at:]
        case _:
            return content[:at] + word + content[at + len(word) :]


def text(value: Any, rng: random.Random) -> bytes:
    """Changed JSON, now and then damaged as text too."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = change(value, rng)
    content = json.dumps(value).encode()
    return damage(content, rng) if rng.random() < 0.15 else content


def copy_model(folder: pathlib.Path, name: str, content: bytes) -> pathlib.Path:
    """The model with one other file."""
    for file in MODEL.iterdir():
        if file.name != name:
            (folder / file.name).symlink_to(file)
    (folder / name).write_bytes(content)
    return folder


def model_config(folder: pathlib.Path, rng: random.Random) -> None:
    from families.published_configs import PUBLISHED
    from meshtune.families import mathematics, model_spec
    from meshtune.weights.check import check
    from meshtune.weights.hub import locate
    from meshtune.weights.load import load_spec
    from meshtune.weights.safetensors_files import headers

    if rng.random() < 0.5:
        config = change(rng.choice(list(PUBLISHED.values())), rng)
        if isinstance(config, dict):
            model_spec(config)
            mathematics(config)
        return
    directory = locate(copy_model(folder, "config.json", text(json.loads((MODEL / "config.json").read_text()), rng)))
    spec, _ = load_spec(directory)
    check(directory, spec, headers(directory))


def safetensors(folder: pathlib.Path, rng: random.Random) -> None:
    from meshtune.weights.hub import locate
    from meshtune.weights.load import load_spec

    content = (MODEL / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    if rng.random() < 0.7:
        header = text(json.loads(content[8 : 8 + length]), rng)
        content = struct.pack("<Q", len(header)) + header + content[8 + length :]
    else:
        content = damage(content[: 8 + length], rng) + content[8 + length :]
    load_spec(locate(copy_model(folder, "model.safetensors", content)))


def index(folder: pathlib.Path, rng: random.Random) -> None:
    from meshtune.weights.safetensors_files import headers

    (folder / "a.safetensors").symlink_to(MODEL / "model.safetensors")
    names = json.loads((MODEL / "model.safetensors").read_bytes()[8:20000].split(b"}}", 1)[0] + b"}}")
    listed = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_bytes(text(listed, rng))
    headers(folder)


def gguf_content() -> bytes:
    """A small sound model, with a tokenizer."""
    from meshtune.quantize.gguf import BY_ID
    from meshtune.weights.gguf.writer import start_file

    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e4,
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"t{n}" for n in range(8)],
        "tokenizer.ggml.token_type": [1] * 8,
        "tokenizer.ggml.merges": ["t 0"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.scores": [0.0] * 8,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ 1 }}",
    }
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    tensors = {f"blk.0.{name}.weight": (BY_ID[0], (32, 32)) for name in names}
    norms = dict.fromkeys(["blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"], (BY_ID[0], (32,)))
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "m.gguf"
        start_file(file, metadata, tensors | norms | {"token_embd.weight": (BY_ID[0], (8, 32))})[0].close()
        return file.read_bytes() + bytes(4 * (7 * 32 * 32 + 3 * 32 + 8 * 32))


def gguf(folder: pathlib.Path, rng: random.Random) -> None:
    from meshtune.weights.gguf.directory import open_gguf
    from meshtune.weights.load import load_spec

    content = gguf_content()
    length = len(content) - 4 * (7 * 32 * 32 + 3 * 32 + 8 * 32)
    start = bytearray(content[:length])
    for _ in range(rng.choice([1, 1, 2, 4])):
        if rng.random() < 0.5 and len(start) > 8:  # a type, a count or a value
            start[rng.randrange(8, len(start))] = rng.randrange(256)
        else:
            start = bytearray(damage(bytes(start), rng))
    (folder / "m.gguf").write_bytes(bytes(start) + content[length:])
    load_spec(open_gguf(folder / "m.gguf", folder))


def adapter(folder: pathlib.Path, rng: random.Random) -> None:
    from safetensors.numpy import save_file

    from meshtune.adapters.peft_format import load_adapter
    from meshtune.weights.load import load_spec

    tensors = {}
    for layer in range(5):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors |= {
            f"{name}.lora_A.weight": np.ones((2, 64), np.float32),
            f"{name}.lora_B.weight": np.ones((64, 2), np.float32),
        }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "bias": "none",
        "base_model_name_or_path": "x",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {"a": 1},
        "alpha_pattern": {},
        "modules_to_save": None,
        "layers_to_transform": None,
        "init_lora_weights": True,
        "exclude_modules": None,
        "target_parameters": None,
        "fan_in_fan_out": False,
        "trainable_token_indices": None,
    }
    (folder / "adapter_config.json").write_bytes(text(config, rng))
    if rng.random() < 0.2:
        file = folder / "adapter_model.safetensors"
        file.write_bytes(damage(file.read_bytes(), rng))
    load_adapter(folder, load_spec(MODEL)[0])


def tokenizer(folder: pathlib.Path, rng: random.Random) -> None:
    from meshtune.data.chat import ChatTemplate
    from meshtune.data.tokenizer import load_tokenizer
    from meshtune.generate.text import text_end
    from meshtune.runs.sources import Source

    name = rng.choice(["tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"])
    file = MODEL / name
    value = (
        json.loads(file.read_text()) if file.is_file() else {"eos_token": "</s>", "additional_special_tokens": ["a"]}
    )
    if name == "generation_config.json":
        value |= {"eos_token_id": [1, 2], "temperature": 0.5}
    copy_model(folder, name, text(value, rng))
    loaded = load_tokenizer(folder)
    text_end(Source(folder, None, str(folder), None), loaded)
    if loaded.chat_template:
        _ = ChatTemplate(loaded).end_of_turn
    loaded.encode("Hello, world")


PIECES = """
'a' 1 messages messages[0] messages[0].content loop.index ns.x range(9) [1,2] {'a':1} (1,2) true none x|length
x|tojson x|upper x|join(',') x+x x*3 x~x x%2 x.split('a') x.replace('a','b') x[1:] x.strip() f(x) x|string
x|list|length x is string x|indent(2) x|map('upper')|list dict(a=x) namespace(a=1) raise_exception('no') x.items()
x|first x|trim x|int x|float -x not(x) '%s'|format(x) '{}'.format(x) x|center(9) x|batch(2)|list x|replace('a','b')
x|urlencode x|groupby('role') x|sort x|unique|list x==x x|sum x|dictsort x|abs x|round x|random x|attr('upper')
strftime_now('%Y') x|wordwrap(3) x|truncate(3) x|filesizeformat
""".split()


def random_template(rng: random.Random, depth: int = 0) -> str:
    def expression() -> str:
        piece = rng.choice(PIECES)
        for _ in range(rng.randrange(3)):
            piece = piece.replace("x", f"({rng.choice(PIECES)})", 1)
        return piece.replace("x", rng.choice(["messages", "'abc'", "ns.x", "7"]))

    body = random_template(rng, depth + 1) if depth < 3 else ""
    return "".join(
        rng.choice(
            [
                f"{{{{ {expression()} }}}}",
                f"{{% for x in {expression()} %}}{body}{{% endfor %}}",
                f"{{% if {expression()} %}}{body}{{% else %}}b{{% endif %}}",
                f"{{% set ns.x = {expression()} %}}",
                f"{{% set ns = namespace(x={expression()}) %}}",
                f"{{% macro f(x) %}}{body}{{% endmacro %}}",
                f"{{% set y %}}{body}{{% endset %}}",
            ]
        )
        for _ in range(rng.randrange(1, 4))
    )


def template(folder: pathlib.Path, rng: random.Random) -> None:
    from meshtune.data.chat import ChatTemplate
    from meshtune.data.chat_templates import template_names, template_text

    loaded = copy.copy(tokenizer_of_model())
    if rng.random() < 0.6:
        source = template_text(rng.choice(template_names())).encode()
        for _ in range(rng.choice([1, 2, 4])):
            source = damage(source, rng)
        loaded.chat_template = source.decode(errors="replace")
    else:
        loaded.chat_template = random_template(rng)
    if loaded.chat_template:
        chat = ChatTemplate(loaded)
        _ = chat.end_of_turn, chat.dialect, chat.role_ends


def tokenizer_of_model() -> Any:
    from meshtune.data.tokenizer import load_tokenizer

    if "tokenizer" not in _LOADED:
        _LOADED["tokenizer"] = load_tokenizer(MODEL)
    return _LOADED["tokenizer"]


_LOADED: dict[str, Any] = {}


def recipe(folder: pathlib.Path, rng: random.Random) -> None:
    import yaml

    from meshtune.config.load import load_recipe, silent

    content = (MODEL.parent / "recipe.yaml").read_bytes()
    if rng.random() < 0.5:
        value = yaml.safe_load(content) | {"method": {"kind": "lora", "rank": 4}, "eval": {"every": 2}}
        for _ in range(rng.choice([1, 2, 4])):
            value = change(value, rng)
        content = yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")
    else:
        for _ in range(rng.choice([1, 2, 4])):
            content = damage(content, rng)
    (folder / "recipe.yaml").write_bytes(content)
    load_recipe(folder / "recipe.yaml", notify=silent)


def data(folder: pathlib.Path, rng: random.Random) -> None:
    import pyarrow
    import pyarrow.parquet

    from meshtune.data.sources import DataSource, open_source

    records = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, {"text": "c"}]
    lines = b"".join(text(record, rng) + b"\n" for record in records * 2)
    kind = rng.choice(["jsonl", "json", "csv", "parquet", "jsonl.gz", "txt"])
    if kind == "json":
        lines = text(records, rng)
    elif kind == "csv":
        lines = damage(b'prompt,completion\n"a, b",c\nd,"e\nf"\n', rng)
    elif kind == "parquet":
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": "x", "b": [1, 2]}] * 3), sink)
        lines = damage(sink.getvalue(), rng)
    elif kind == "jsonl.gz":
        lines = gzip.compress(lines)
        lines = damage(lines, rng) if rng.random() < 0.5 else lines
    elif rng.random() < 0.5:
        lines = damage(lines, rng)
    (folder / f"data.{kind}").write_bytes(lines)
    list(open_source(DataSource(path=str(folder / f"data.{kind}"))).sweep())


def request(folder: pathlib.Path, rng: random.Random) -> None:
    from meshtune.serve.guard import ApiError
    from meshtune.serve.schema import ChatRequest, CompletionRequest, ScoreRequest, parse_request

    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "tools": [tool],
        "n": 2,
        "max_tokens": 4,
        "temperature": 0.5,
        "top_k": 3,
        "stop": ["a"],
        "seed": 1,
        "logit_bias": {"3": 1.0},
        "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
        "chat_template_kwargs": {"a": 1},
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 3,
    }
    completion = {"model": "m", "prompt": ["a", "b"], "max_tokens": 3, "echo": True, "logprobs": 2, "best_of": 1}
    kind, body = rng.choice(
        [(ChatRequest, chat), (CompletionRequest, completion), (ScoreRequest, {"model": "m", "text": "a"})]
    )
    for _ in range(rng.choice([1, 2, 4])):
        body = change(body, rng)
    with contextlib.suppress(ApiError):
        parse_request(kind, body if isinstance(body, dict) else {"body": body})


READERS: dict[str, Callable[[pathlib.Path, random.Random], None]] = {
    reader.__name__: reader
    for reader in (model_config, safetensors, index, gguf, adapter, tokenizer, template, recipe, data, request)
}


class TooSlow(BaseException):
    """A case took more than CASE_SECONDS of processor time."""


def expire(number: int, frame: object) -> None:
    raise TooSlow


def run_case(reader: str, seed: int, case: int) -> str | None:
    """Runs a case; returns what went wrong."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="fuzz-"))
    signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
    try:
        READERS[reader](folder, random.Random(f"{reader} {seed} {case}"))
    except UserError as error:
        str(error).encode()
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        frames = [entry for entry in traceback.extract_tb(error.__traceback__) if "meshtune" in entry.filename]
        line = f"{frames[-1].filename.rpartition('meshtune/')[2]}:{frames[-1].lineno}" if frames else "?"
        return f"{type(error).__name__}: {str(error)[:200]} ({line}, {place.name})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        shutil.rmtree(folder, ignore_errors=True)
    return None


def import_readers() -> None:
    """Imports what readers import by themselves, which is no part of the time of a case."""

    tokenizer_of_model()


def main(readers: str, seed: int, cases: int, seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, expire)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
    import_readers()
    for reader in readers.split(","):
        started, case = time.monotonic(), 0
        while case < cases and time.monotonic() - started < seconds:
            print(json.dumps({"reader": reader, "seed": seed, "case": case}), flush=True)
            if wrong := run_case(reader, seed, case):
                print(json.dumps({"reader": reader, "seed": seed, "case": case, "wrong": wrong}), flush=True)
            case += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
