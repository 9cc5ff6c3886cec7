"""Falcon's architectures: groups of heads with two norms (40B) or one (11B), one key-value head (7B), ALiBi (RW)."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case("falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    Case(
        "falcon_11b",
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 72,
            "tie_word_embeddings": False,
        },
    ),
    # One key and value head, packed with the queries: tp is refused.
    Case("falcon_7b", "falcon", {"multi_query": True}, meshes=({"fsdp": 2, "cp": 2},)),
    Case(
        "falcon_rw",
        "falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        attention="sdpa",  # transformers' eager attention adds the biases of ALiBi twice
    ),
)
