"""A real llama.cpp: the shared library of the package xllamacpp, called by its C interface."""

from __future__ import annotations

import ctypes
import functools
import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CONTEXT, THREADS = 512, 2


class _Params(ctypes.Structure):
    """Parameters that are passed by value, with room for more fields than any version has."""

    _fields_ = [("words", ctypes.c_uint32 * 256)]


# Places of fields in llama_context_params, in words of 32 bits.
N_CTX, N_BATCH, N_UBATCH, N_OUTPUTS, N_OUTPUTS_PER_SEQUENCE, N_THREADS, N_THREADS_BATCH = 0, 1, 2, 5, 6, 7, 8
FLASH_ATTENTION, TYPE_K, TYPE_V = 13, 26, 27


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


@functools.cache
def library() -> Any:
    """The library; the test is skipped where it is not installed."""
    module = pytest.importorskip("xllamacpp")
    (file,) = glob.glob(os.path.join(os.path.dirname(module.__file__), "*.so"))
    lib = ctypes.CDLL(file)
    pointers = (
        "llama_model_load_from_file",
        "llama_init_from_model",
        "llama_model_get_vocab",
        "llama_adapter_lora_init",
    )
    for name in (*pointers, "llama_get_memory", "llama_get_logits"):
        getattr(lib, name).restype = ctypes.c_void_p
    for name in ("llama_model_default_params", "llama_context_default_params"):
        getattr(lib, name).restype = _Params
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Params]
    lib.llama_init_from_model.argtypes = [ctypes.c_void_p, _Params]
    lib.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
    _silence(lib)
    lib.llama_backend_init()
    return lib


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
MESSAGES: list[str] = []


@_CALLBACK
def _keep(_level: int, text: bytes, _data: object) -> None:
    MESSAGES.append(text.decode(errors="replace"))


def _silence(lib: Any) -> None:
    lib.llama_log_set(_keep, None)


def _errors() -> str:
    return "".join(text for text in MESSAGES if "error" in text or "failed" in text or "missing" in text)


class LlamaCpp:
    """A model of a GGUF file, with adapters. Raises ValueError with llama.cpp's own words where it does not load."""

    def __init__(self, file: Path, adapters: Sequence[Path] = (), context: int = CONTEXT):
        self.lib = library()
        MESSAGES.clear()
        self.model = self.lib.llama_model_load_from_file(str(file).encode(), self.lib.llama_model_default_params())
        if not self.model:
            raise ValueError(_errors())
        params = self.lib.llama_context_default_params()
        assert (params.words[TYPE_K], params.words[TYPE_V]) == (1, 1), "another version of llama_context_params"
        params.words[TYPE_K] = params.words[TYPE_V] = params.words[FLASH_ATTENTION] = 0  # a cache in float32
        for place in (N_CTX, N_BATCH, N_UBATCH, N_OUTPUTS, N_OUTPUTS_PER_SEQUENCE):
            params.words[place] = context
        params.words[N_THREADS] = params.words[N_THREADS_BATCH] = THREADS
        self.context = self.lib.llama_init_from_model(ctypes.c_void_p(self.model), params)
        if not self.context:
            raise ValueError(_errors())
        self.vocab = ctypes.c_void_p(self.lib.llama_model_get_vocab(ctypes.c_void_p(self.model)))
        if adapters:
            loaded = [
                self.lib.llama_adapter_lora_init(ctypes.c_void_p(self.model), str(path).encode()) for path in adapters
            ]
            if not all(loaded):
                raise ValueError(_errors())
            array = (ctypes.c_void_p * len(loaded))(*loaded)
            scales = (ctypes.c_float * len(loaded))(*[1.0] * len(loaded))
            assert (
                self.lib.llama_set_adapters_lora(
                    ctypes.c_void_p(self.context), array, ctypes.c_size_t(len(loaded)), scales
                )
                == 0
            )

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self.lib.llama_free(ctypes.c_void_p(self.context))
        self.lib.llama_model_free(ctypes.c_void_p(self.model))

    def logits(self, tokens: Sequence[int], first: int = 0) -> np.ndarray:
        """float32 logits [T, V] of tokens at positions from `first` on; from 0 the memory is cleared."""
        if first == 0:
            self.lib.llama_memory_clear(
                ctypes.c_void_p(self.lib.llama_get_memory(ctypes.c_void_p(self.context))), ctypes.c_bool(True)
            )
        n = len(tokens)
        sequence = (ctypes.c_int32 * 1)(0)
        batch = _Batch(
            n,
            (ctypes.c_int32 * n)(*tokens),
            None,
            (ctypes.c_int32 * n)(*range(first, first + n)),
            (ctypes.c_int32 * n)(*[1] * n),
            (ctypes.POINTER(ctypes.c_int32) * n)(*[ctypes.cast(sequence, ctypes.POINTER(ctypes.c_int32))] * n),
            (ctypes.c_int8 * n)(*[1] * n),
        )
        assert self.lib.llama_decode(ctypes.c_void_p(self.context), batch) == 0
        size = self.lib.llama_vocab_n_tokens(self.vocab)
        pointer = ctypes.cast(self.lib.llama_get_logits(ctypes.c_void_p(self.context)), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (n, size)).copy()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens with the largest logits, one after another."""
        answer: list[int] = []
        row, position = self.logits(prompt)[-1], len(prompt)
        for _ in range(count):
            answer.append(int(row.argmax()))
            row, position = self.logits(answer[-1:], position)[-1], position + 1
        return answer

    def ends_at(self, token: int) -> bool:
        """Whether llama.cpp stops generating at a token."""
        self.lib.llama_vocab_is_eog.restype = ctypes.c_bool
        return self.lib.llama_vocab_is_eog(self.vocab, ctypes.c_int32(token))

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Token ids, with the tokens that the file says begin a text, and special tokens in it read as such."""
        content = text.encode()
        ids = (ctypes.c_int32 * (len(content) + 16))()
        count = self.lib.llama_tokenize(
            self.vocab, content, len(content), ids, len(ids), ctypes.c_bool(special), ctypes.c_bool(True)
        )
        assert count >= 0
        return list(ids[:count])


class _Traits(ctypes.Structure):
    """The start of ggml_type_traits."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("nbytes", ctypes.c_size_t),
        ("quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


def type_traits(kind: int) -> _Traits:
    """The name, block and bytes of a type, and the function that decodes it."""
    library().ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    return library().ggml_get_type_traits(ctypes.c_int(kind)).contents


def dequantize(kind: int, content: np.ndarray) -> np.ndarray:
    """The numbers of whole blocks of rows by llama.cpp's own code."""
    traits = type_traits(kind)
    content = np.ascontiguousarray(content)
    numbers = np.empty((content.shape[0], content.shape[1] // traits.nbytes * traits.block), np.float32)
    traits.to_float(content.ctypes.data, numbers.ctypes.data, numbers.size)
    return numbers


def quantize(kind: int, numbers: np.ndarray, nbytes: int) -> np.ndarray:
    """Rows in a type by llama.cpp's own code, as bytes."""
    numbers = np.ascontiguousarray(numbers, np.float32)
    content = np.zeros((numbers.shape[0], nbytes), np.uint8)
    integers = (ctypes.c_int64(0), ctypes.c_int64(numbers.shape[0]), ctypes.c_int64(numbers.shape[1]))
    data = (ctypes.c_void_p(numbers.ctypes.data), ctypes.c_void_p(content.ctypes.data))
    library().ggml_quantize_chunk(ctypes.c_int(kind), *data, *integers, None)
    return content
