"""Small random models of every family that is written as GGUF, with a tokenizer, and their logits."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from families import case
from families.cases import BY_NAME
from meshtune.weights.load import load_params, load_spec


def small_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of letters, with two merges and an end of text."""
    letters = [chr(n) for n in range(33, 33 + size - 3)]
    vocab = {text: number for number, text in enumerate(["<|endoftext|>", *letters, "ab", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def with_tokenizer(directory: Path, vocab: int) -> Path:
    """A model directory with a tokenizer in it."""
    small_tokenizer(vocab).save_pretrained(directory)
    return directory


@functools.cache
def small_model(name: str) -> Path:
    """The files of a case of tests/families, with a tokenizer."""
    original = case.directory(BY_NAME[name])
    directory = original.with_name(f"{original.name}-gguf")
    shutil.copytree(original, directory)
    return with_tokenizer(directory, load_spec(directory)[0].vocab)


def logits_of(directory: Path, tokens: list[int]) -> np.ndarray:
    """Our float32 logits [T, V] of a model directory, or GGUF file."""
    spec, _ = load_spec(directory, "float32")
    params = load_params(directory, spec)
    ids = jnp.asarray([tokens])
    positions, segments = jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)
    return np.asarray(case.our_logits(params, spec, ids, positions, segments))[0]
