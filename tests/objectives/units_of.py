"""Batches of pairs and labelled answers from lists of ids, through the store and the loader of a run."""

from __future__ import annotations

import hashlib

import numpy as np

from meshtune.data.conversation import Origin
from meshtune.data.loader import Loader, Units
from meshtune.data.store import cache_directory, write_store
from meshtune.data.tokens import Example


def store_of(documents, cache):
    """A store of (ids, learned, value): neighbours belong together."""
    examples = [
        Example(np.asarray(ids, np.int32), np.asarray(learned, np.float32), Origin("made", number // 2), float(value))
        for number, (ids, learned, value) in enumerate(documents)
    ]
    content = repr([(example.ids.tolist(), example.weights.tolist(), example.value) for example in examples])
    key = hashlib.sha256(content.encode()).hexdigest()[:24]
    return write_store(cache_directory(cache) / key, examples, dict)


def loader_of(documents, cache, *, packing=False, rows=None, max_length=48, accumulation=1, **units):
    """A loader in the documents' own order; without packing a row holds one unit."""
    return Loader(
        store_of(documents, cache),
        max_length=max_length,
        batch_size=rows or len(documents) // 2,
        accumulation=accumulation,
        packing=packing,
        shuffle=False,
        units=Units(**units),
    )


def random_pairs(vocab, count, longest=20, seed=0, value=0.0):
    """Documents of `count` pairs: prompts of 2 to 6 tokens, answers of 3 to `longest`."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        prompt = rng.integers(1, vocab, rng.integers(2, 7))
        for _side in range(2):
            answer = rng.integers(1, vocab, rng.integers(3, longest))
            ids = np.concatenate([prompt, answer])
            documents.append((ids, np.arange(len(ids)) >= len(prompt), value))
    return documents
