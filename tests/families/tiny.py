"""A small random model of every model_type that is supported, those that transformers does not have too."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from baichuan_files import directory as baichuan_directory
from baichuan_in_torch import SEVEN
from families.case import SMALL, torch_model, write_model
from families.cases import CASES
from families.published_configs import PUBLISHED
from meshtune.families import model_spec
from meshtune.model.spec import init_params
from meshtune.weights.export import export_model


def tiny_model(name: str, folder: pathlib.Path, vocab: int, **config: Any) -> pathlib.Path:
    """A directory with the first tiny model of a model_type of FAMILIES, with a vocabulary of `vocab` tokens; of those
    that transformers has, with other fields in its `config`."""
    if name == "baichuan":
        return baichuan_directory(folder, SEVEN | {"vocab_size": vocab})[0]
    if name == "internlm2":
        return own_model(PUBLISHED["internlm/internlm2_5-7b-chat"] | SMALL | {"vocab_size": vocab}, folder)
    model_type = {"kimi_k2": "deepseek_v3"}.get(name, name)
    case = next(case for case in CASES if case.model_type == model_type)
    model = write_model(torch_model(case.changed(vocab_size=vocab, **config)))
    if model_type != name:
        fields = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(fields | {"model_type": name}))
    return model


def own_model(config: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """A random model of a family that transformers does not have, written by us."""
    (folder / "source").mkdir()
    (folder / "source/config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    save_file({"unused": np.ones(1, np.float32)}, folder / "source/model.safetensors")
    spec = model_spec(config)
    return export_model(init_params(spec, jax.random.key(0)), spec, folder / "source", folder / "base").path
