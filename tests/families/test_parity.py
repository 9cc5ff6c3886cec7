"""Every family computes what transformers computes from the files that transformers wrote: ordinary rows, rows beyond
every window and original context, and documents packed into one row. One compiled program a family.

The whole proof of a family is test_matrix.py, in the slow tier. One family alone: `pytest tests/families -k gemma2`.
"""

from __future__ import annotations

import numpy as np
import pytest

from families.case import VOCAB, Case, as_inputs, load_case, our_logits, torch_logits, torch_model
from families.cases import FIRST
from meshtune.model.compute import Compute

SHORT = 9


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_logits_equal_transformers(case: Case):
    """float32 on both sides: 1e-4, or 3e-5 of the largest logit. The second row holds two documents, each with the
    logits that it has in its own row."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, VOCAB, length) for length in (case.beyond, SHORT, case.beyond - SHORT - 5)]
    rows = as_inputs([documents[:1], documents[1:]], case.beyond)
    spec, params = load_case(case)
    ours = our_logits(params, spec, *rows, Compute(attention="direct"))
    model = torch_model(case)
    full, short, long = (torch_logits(model, ids[None])[0] for ids in documents)
    for actual, expected in (
        (ours[0], full),
        (ours[1, :SHORT], short),
        (ours[1, SHORT : SHORT + len(long)], long),
    ):
        largest = float(np.abs(expected).max())
        np.testing.assert_allclose(actual, expected, atol=max(1e-4, 3e-5 * largest), rtol=1e-4)
