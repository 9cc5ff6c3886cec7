"""One piece of work for a trace: from the config.json of a small Llama to its logits.

See README.md.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from meshtune.families import model_spec
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import Inputs
from meshtune.model.spec import init_params

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip

FILE = Path(tempfile.mkdtemp()) / "config.json"
FILE.write_text(json.dumps(CONFIG), encoding="utf-8")
TOKENS = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
INPUTS = Inputs(TOKENS, jnp.tile(jnp.arange(8, dtype=jnp.int32), (2, 1)), jnp.ones_like(TOKENS))


def work() -> jax.Array:
    """Reads the config, draws weights and computes the logits of two rows of tokens."""
    config = json.loads(FILE.read_text(encoding="utf-8"))
    spec = model_spec(config, where=str(FILE))
    params = init_params(spec, jax.random.key(0))
    return logits(params, spec, forward(params, spec, Compute(), INPUTS).hidden)
