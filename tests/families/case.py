"""Small random models of transformers, the files that transformers writes of them, and what our loader reads there."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
import transformers
from jaxtyping import Array

from meshtune.arrays.tree import Tree
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import Inputs
from meshtune.model.spec import ModelSpec
from meshtune.weights.load import load_params, load_spec

VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
Randomise = Callable[[str, torch.Tensor], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A tiny model of one family, in which every kind of its layers occurs and no number is trivially zero or one.

    `config` changes SMALL, without the fields that the family's config does not know. `randomise(name,
    tensor)` fills a parameter or buffer in place and returns True, or False to leave it to `randomise` of this module.
    `targets` are the Hugging Face names of LoRA's target modules, and `peft` options of peft's own LoraConfig, where
    "all-linear" is not it. `beyond` is a length beyond every window and original context, `generated` the tokens that
    are generated after prompts of 5 and 11. `meshes` are those on which an update must be that of one device; None:
    fsdp with tp, with cp (but for what the family's `limits` refuse) and, where there are experts, with ep.
    `vocab_on_mesh` is the size of the vocabulary there. Of a `variant`, which differs from another case in the forward
    pass only (a rotary embedding, a width), logits and gradients alone are compared.

    Of a composite, `model_type` is the outer one, `text` the model_type of its text_config, which `config` describes,
    and `outside` are the other fields of the outer config.
    """

    name: str
    model_type: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    text: str | None = None
    outside: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    auto_class: type = transformers.AutoModelForCausalLM
    randomise: Randomise | None = None
    targets: str | tuple[str, ...] = "all-linear"
    peft: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    beyond: int = 150
    generated: int = 24
    meshes: tuple[Mapping[str, int], ...] | None = None
    vocab_on_mesh: int = 96
    attention: str = "eager"
    variant: bool = False

    def torch_config(self) -> transformers.PreTrainedConfig:
        """The config as transformers has it."""
        text = self.text or self.model_type
        fields = _known_fields(text, {"pad_token_id": None} | SMALL) | dict(self.config)
        if self.text is not None:
            fields = {"text_config": {"model_type": self.text, **fields}, **self.outside}
        return transformers.AutoConfig.for_model(self.model_type, **fields)

    def changed(self, **fields: Any) -> Case:
        """The same case with other fields in its (text) config."""
        return dataclasses.replace(self, config={**self.config, **fields})


def _known_fields(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    config = transformers.AutoConfig.for_model(model_type)
    known = config.to_dict().keys() | config.attribute_map.keys()
    return {name: value for name, value in fields.items() if name in known}


def torch_model(case: Case, seed: int = 0) -> transformers.PreTrainedModel:
    """A random float32 model of transformers."""
    config = case.torch_config()
    torch.manual_seed(seed)
    model = case.auto_class.from_config(
        config, attn_implementation=case.attention, experts_implementation="eager", dtype=torch.float32
    )
    saved = model.state_dict().keys()
    tensors = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in saved}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if case.randomise is None or not case.randomise(name, tensor):
                randomise(name, tensor)
            assert tensor.numel() == 1 or tensor.min() < tensor.max(), f"{name} is a constant"
    return model.eval()


def randomise(name: str, tensor: torch.Tensor) -> None:
    """Makes vectors and constant arrays random: biases around 0, norms, sinks, decays and all others around 1."""
    if tensor.ndim <= 1 or tensor.min() == tensor.max():
        tensor.copy_(torch.randn_like(tensor) * 0.3 + (0.0 if name.endswith("bias") else 1.0))


_FOLDER = tempfile.TemporaryDirectory(prefix="meshtune-cases-")


@functools.cache
def directory(case: Case) -> Path:
    """The model as transformers writes it, once a process."""
    return write_model(torch_model(case))


def write_model(model: transformers.PreTrainedModel) -> Path:
    """A directory with a model of transformers; it lasts as long as this process."""
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.name))
    model.save_pretrained(folder)
    return folder


def load_case(case: Case) -> tuple[ModelSpec, Tree]:
    """Our spec and parameters of a case, read from the files that transformers wrote."""
    spec, _ = load_spec(directory(case), "float32")
    return spec, load_params(directory(case), spec)


@functools.partial(jax.jit, static_argnums=(1, 5))
def our_logits(
    params: Tree, spec: ModelSpec, tokens: Array, positions: Array, segment_ids: Array, compute: Compute = Compute()
) -> Array:
    """float32 logits [B, T, V]."""
    return logits(params, spec, forward(params, spec, compute, Inputs(tokens, positions, segment_ids)).hidden)


def torch_logits(model: torch.nn.Module, tokens: Any) -> Any:
    """float32 logits [B, T, V] as numpy."""
    with torch.no_grad():
        return model(torch.as_tensor(tokens).long()).logits.float().numpy()


def as_inputs(documents: list[list[Any]], width: int) -> tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray]:
    """(tokens, positions, segment_ids) of rows of documents, filled up to `width` with segment 0."""
    rows: list[list[list[int]]] = []
    for row in documents:
        tokens, positions, segments = [], [], []
        for number, ids in enumerate(row, 1):
            tokens += [int(token) for token in ids]
            positions += range(len(ids))
            segments += [number] * len(ids)
        rows.append([column + [0] * (width - len(tokens)) for column in (tokens, positions, segments)])
    stacked = jnp.asarray(rows, jnp.int32)
    return stacked[:, 0], stacked[:, 1], stacked[:, 2]
