"""Models that cannot be trained here: known by their config.json where it is at hand, else by their names."""

from __future__ import annotations

import pathlib
import re

from meshtune.config.foreign.draft import Draft
from meshtune.errors import UserError
from meshtune.json_text import read_json

VISION = "it is a model of images, video or sound, of which nothing is trained here"
OWN_CODE = "its code is in its repository, which is never run here"
# Models of other tools' examples, by what their names contain.
LACKING = (
    (r"-VL\b|-VL-|_VL-|llava|pixtral|InternVL|SmolVLM|Voxtral|Vision|GLM-[\d.]+V|VL\d", VISION),
    (r"jamba", "its family (jamba) is not implemented"),
    (r"\bmpt-|dbrx|gpt-j-|btlm|xgen-7b|replit-code|MiMo-7B|Qwen/Qwen-(7|14|72)B", "its family is not implemented"),
    (r"state-spaces/mamba-[\d.]+b", "its family (mamba, the first) is not implemented"),
    (r"Kimi-Linear|DeepSeek-V4|GLM-5|Mistral-Small-4", "its family is not implemented"),
    (r"NVFP4", "its files are in nvfp4, which is not read"),
    (
        r"Linearized",
        "its experts are stored in another layout than the published model's, which is read and quantised as it is",
    ),
    (r"aqlm", "its files are in AQLM's codes, which are not read"),
    (r"Falcon-E-|1\.58|BitNet", "its weights are ternary (BitNet), which is not implemented"),
    (r"DeepSeek-V2\.5-bnb", "its family's bitsandbytes codes of single experts are not read"),
)
INSTEAD = "use a model of a supported family (meshtune families)"


def check_model(draft: Draft, key: str, path: str) -> None:
    """Refuses `key` where the model that it names cannot be trained here."""
    reason = lacking(path)
    if reason is not None:
        draft.refuse(key, f"{path}: {reason}", INSTEAD)


def lacking(path: str) -> str | None:
    """Why a model cannot be trained here, or None where nothing is known against it."""
    config = pathlib.Path(path).expanduser() / "config.json"
    if config.is_file():
        return _of_config(config)
    for pattern, reason in LACKING:
        if re.search(pattern, path, re.IGNORECASE):
            return reason
    return None


def _of_config(file: pathlib.Path) -> str | None:
    from meshtune.families import model_spec

    try:
        model_spec(read_json(file), where=str(file))
    except UserError as problem:
        return problem.what
    return None


def layers_of(path: str) -> int | None:
    """The number of layers of a model on this disk."""
    file = pathlib.Path(path).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        layers = read_json(file).get("num_hidden_layers")
    except UserError:  # check_model has refused it
        return None
    return layers if isinstance(layers, int) else None
