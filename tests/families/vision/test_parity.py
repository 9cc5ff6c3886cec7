"""Models that see compute what transformers computes from the files and pictures that transformers gives them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest
import torch

from families.case import torch_model
from families.vision.cases import CASES
from families.vision.sights import (
    Answer,
    Document,
    VisionCase,
    batch_of,
    ids_of,
    load,
    mean_loss,
    our_logits,
    picture,
    torch_gradients,
    torch_run,
    words,
)
from meshtune.arrays.tree import Tree, flatten

every_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case.case.variant else (), id=case.name) for case in CASES],
)
# Whose gradients are the fast tier's: features of layers of the tower and M-RoPE; pooled features that see each other.
DIFFERENTIATED = ("qwen3_vl", "gemma3")


def documents_of(case: VisionCase) -> list[Document]:
    """Two pictures of different sizes between words, and words alone."""
    wide, tall = case.read(picture(60, 30, 1)), case.read(picture(40, 50, 2))
    if case.prefix:
        return [[words(5, 3), wide, words(4, 4), tall, Answer(words(6, 5))], [words(11, 6), Answer(words(6, 7))]]
    return [[words(5, 3), wide, words(4, 4), tall, words(6, 5)], [words(17, 6)]]


def patches_of(document: Document) -> int:
    return sum(len(part.patches) for part in document if not isinstance(part, list))


def room_for(documents: Sequence[Document]) -> int:
    """A length of rows that hold these documents and some padding, a multiple of 16."""
    return -(-sum(len(ids_of(document)) for document in documents) // 16) * 16 + 16


def close_gradients(ours: Tree, theirs: Tree, tolerance: float = 1e-4) -> None:
    """Every gradient within `tolerance` of its norm; of one that cancels out to nothing, of a thousandth of all."""
    flat, expected = flatten(ours), flatten(theirs)
    assert flat.keys() == expected.keys()
    total = np.sqrt(sum(float(np.square(leaf).sum()) for leaf in expected.values()))
    for path, leaf in expected.items():
        norm = float(np.linalg.norm(leaf))
        assert np.linalg.norm(np.asarray(flat[path]) - np.asarray(leaf)) <= tolerance * max(norm, 1e-3 * total), path


def rows_of(case: VisionCase) -> tuple[list[Document], dict[str, jax.Array]]:
    """Documents, and a row for each: of two pictures, and of words alone."""
    documents = documents_of(case)
    return documents, batch_of([[d] for d in documents], room_for(documents[:1]), 2 * patches_of(documents[0]))


@every_case
def test_logits_equal_transformers(case: VisionCase):
    """Float32 on both sides, 1e-5 of the largest number."""
    documents, batch = rows_of(case)
    spec, params = load(case)
    with torch.no_grad():
        theirs, _ = torch_run(torch_model(case.case), documents)
    ours = our_logits(params, spec, batch)
    for row, expected in enumerate(theirs):
        difference = np.abs(np.asarray(ours[row, : len(expected)]) - expected).max()
        assert difference <= 1e-5 * np.abs(expected).max(), (row, difference)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c.name in DIFFERENTIATED else pytest.mark.slow, id=c.name) for c in CASES]
)
def test_loss_and_gradients_equal_transformers(case: VisionCase):
    documents, batch = rows_of(case)
    spec, params = load(case)
    value, gradient = jax.jit(jax.value_and_grad(mean_loss), static_argnums=1)(params, spec, batch)
    loss, expected = torch_gradients(case, spec, documents)
    assert float(value) == pytest.approx(loss, rel=1e-5)
    close_gradients(gradient, expected)
