"""Tiny random models of the five families, a tokenizer and texts, written without Meshtune or transformers.

Everything is drawn by numpy from fixed seeds, so that two trees of the code are given the very same files.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator

import numpy as np
from safetensors.numpy import save_file

VOCAB, EMBED, FFN, LAYERS, HEADS, HEAD_DIM = 256, 64, 128, 4, 8, 8
END = VOCAB - 1  # the id of </s>
COMMON = {
    "vocab_size": VOCAB, "hidden_size": EMBED, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
    "bos_token_id": None, "eos_token_id": END, "initializer_range": 0.1,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "max_position_embeddings": 512, "rope_theta": 10000.0}
# Each differs from Llama in what makes its family: a window, biases and windows of some layers, norms of queries and
# keys with a tied head, packed projections with ALiBi and a normalised head.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, **GROUPED},
    "mistral": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "tie_word_embeddings": False,
        "sliding_window": 19, **GROUPED,
    },
    "qwen2": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False,
        "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 2, **GROUPED,
    },
    "qwen3": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True,
        "attention_bias": False, "head_dim": HEAD_DIM, **GROUPED,
    },
    "baichuan": {
        "model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "tie_word_embeddings": False,
        "model_max_length": 512,
    },
}  # fmt: skip
TEXTS, SHORTEST, LONGEST = 60, 8, 60
# The first words of the texts that generation goes on with.
PROMPTS = ("w1 w4 w9 w16", "w3", "w2 w4 w6 w8 w10 w12 w14 w16 w18 w20 w22 w24")


def tensors(family: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes that a family's checkpoint has on the Hugging Face hub."""
    kv = EMBED if family == "baichuan" else 2 * HEAD_DIM
    yield "model.embed_tokens.weight", (VOCAB, EMBED)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        if family == "baichuan":
            yield f"{at}.self_attn.W_pack.weight", (3 * EMBED, EMBED)
        else:
            for name, size in (("q", HEADS * HEAD_DIM), ("k", kv), ("v", kv)):
                yield f"{at}.self_attn.{name}_proj.weight", (size, EMBED)
                if family == "qwen2":
                    yield f"{at}.self_attn.{name}_proj.bias", (size,)
                elif family == "qwen3" and name != "v":
                    yield f"{at}.self_attn.{name}_norm.weight", (HEAD_DIM,)
        yield f"{at}.self_attn.o_proj.weight", (EMBED, HEADS * HEAD_DIM)
        yield f"{at}.mlp.gate_proj.weight", (FFN, EMBED)
        yield f"{at}.mlp.up_proj.weight", (FFN, EMBED)
        yield f"{at}.mlp.down_proj.weight", (EMBED, FFN)
        yield f"{at}.input_layernorm.weight", (EMBED,)
        yield f"{at}.post_attention_layernorm.weight", (EMBED,)
    yield "model.norm.weight", (EMBED,)
    if family != "qwen3":
        yield "lm_head.weight", (VOCAB, EMBED)


def write_model(folder: pathlib.Path, family: str) -> None:
    """A float32 model directory: config.json and model.safetensors."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng([20, sorted(FAMILIES).index(family)])
    arrays = {name: _draw(rng, name, shape) for name, shape in tensors(family)}
    if family != "baichuan":  # whose head divides by the length of its rows
        arrays["lm_head.weight" if "lm_head.weight" in arrays else "model.embed_tokens.weight"][END] = 0  # no early end
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(COMMON | FAMILIES[family]))


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) > 1:
        array = rng.normal(0, 1 / math.sqrt(shape[1]), shape)
    else:
        array = rng.normal(0, 0.2, shape) + (0.0 if name.endswith("bias") else 1.0)
    return array.astype(np.float32)


def write_tokenizer(folder: pathlib.Path) -> None:
    """A tokenizer of the words w0, w1 ...: decoded text names every token.

    It has a folder of its own: beside a Qwen2 config transformers would read these files as Qwen2's tokenizer.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    vocabulary = {f"w{number}": number for number in range(END)} | {"</s>": END}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue] - a property of the class
    tokenizer.add_special_tokens(["</s>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    config |= dict.fromkeys(("pad_token", "unk_token", "bos_token"), "</s>")  # a family would add its own
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_texts(file: pathlib.Path) -> None:
    """Documents of few words in sequences that a model can learn, several to a row of 64 tokens."""
    rng = np.random.default_rng(21)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(TEXTS):
            start, stride = (int(number) for number in rng.integers(1, 12, 2))
            length = int(rng.integers(SHORTEST, LONGEST))
            noise = rng.integers(0, 2, length)
            tokens = [f"w{(start + stride * place + int(noise[place])) % 40}" for place in range(length)]
            out.write(json.dumps({"text": " ".join(tokens)}) + "\n")
