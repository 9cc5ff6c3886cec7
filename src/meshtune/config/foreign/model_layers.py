"""The linear layers of families whose adapters need more than names: mixtures of experts, and layers of other names.

Other tools ignore a name that no module of the model has. What they adapt of a mixture follows from transformers,
which since 5.0 keeps the matrices of all experts in one parameter that is no linear layer, and from peft, which since
0.19 reads the old names of those matrices (gate_proj) as that parameter, for the families marked `converted`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LITE = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
NUMBERED = ("w1", "w2", "w3")
USUAL = frozenset((*ATTENTION, *GATED))
ROUTERS = ("gate", "router", "gate.wg")
EXPERTS = "experts"


@dataclasses.dataclass(frozen=True)
class Layers:
    """Linear layers by name, without routed and shared experts.

    `experts` are the names of an expert's matrices, none in a dense model. `converted`: peft reads them as the routed
    experts. `beside`: linear layers outside the routed experts have those names too (shared experts, dense layers).
    """

    linear: tuple[str, ...]
    experts: tuple[str, ...] = ()
    converted: bool = False
    beside: bool = False

    @property
    def is_mixture(self) -> bool:
        return bool(self.experts)


FUSED = ("o_proj", "gate_up_proj", "down_proj")
CONVOLUTIONS = ("q_proj", "k_proj", "v_proj", "out_proj", "in_proj", *(f"feed_forward.{name}" for name in NUMBERED))
DELTA = tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"))
NEXT_DELTA = tuple(f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"))
# Patterns over a model's path, the first that matches; names as they are published.
BY_NAME: tuple[tuple[str, Layers], ...] = (
    (r"Phi-3\.5-MoE", Layers(ATTENTION, NUMBERED)),
    (r"Phi-[34]", Layers(("qkv_proj", *FUSED))),
    (r"GLM-4\.7-Flash", Layers(LATENT, GATED, converted=True, beside=True)),
    (r"GLM-4\.[567]", Layers(ATTENTION, GATED, converted=True, beside=True)),
    (r"GLM-(4|Z1)-\d+B-|glm-4-9b|glm-edge", Layers((*ATTENTION, *FUSED[1:]))),
    (r"DeepSeek-(Coder-)?V2-Lite|Moonlight", Layers(LITE, GATED, converted=True, beside=True)),
    (r"DeepSeek-R1-Distill", Layers((*ATTENTION, *GATED))),
    (r"DeepSeek-(Coder-)?V[23]|DeepSeek-R1|Kimi-K2", Layers(LATENT, GATED, converted=True, beside=True)),
    (r"Mixtral", Layers(ATTENTION, NUMBERED, converted=True)),
    (r"MiniMax-M2", Layers(ATTENTION, NUMBERED, converted=True)),
    (r"OLMoE|Qwen3-(Coder-)?\d+B-A\d+B", Layers(ATTENTION, GATED, converted=True)),
    (r"Qwen3-Next", Layers((*ATTENTION, *NEXT_DELTA), GATED, converted=True, beside=True)),
    (r"Qwen3\.[56]-\d+B-A\d+B", Layers((*ATTENTION, *DELTA), GATED, beside=True)),
    (r"Qwen1\.5-MoE|Qwen2-57B", Layers(ATTENTION, GATED, beside=True)),
    (r"gpt-oss", Layers(ATTENTION, GATED)),
    (r"granite-3\.\d-\d+b-a\d+m", Layers(ATTENTION, GATED)),
    (r"granite-4\.0-(h-)?(tiny|small)", Layers((*ATTENTION, "mamba.in_proj", "mamba.out_proj"), GATED, beside=True)),
    (r"Llama-4", Layers(ATTENTION, GATED, beside=True)),
    (r"gemma-4-26B", Layers((*ATTENTION, *(f"mlp.{name}" for name in GATED)), GATED)),
    (r"LFM2-\d+B-A\d+B", Layers(CONVOLUTIONS, NUMBERED)),
    (r"LFM2-", Layers(CONVOLUTIONS)),
    (r"Nemotron-3", Layers((*ATTENTION, "mixer.in_proj"), GATED[1:], beside=True)),
    (r"Trinity|dots\.llm1|ERNIE-4\.5-\d+B-A|K-EXAONE|Hunyuan-A13B", Layers(ATTENTION, GATED, True, True)),
)


# model_type in a config.json on this disk -> a name that stands for it.
BY_TYPE = {
    "afmoe": "Trinity",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
    "dots1": "dots.llm1",
    "ernie4_5_moe": "ERNIE-4.5-21B-A3B",
    "exaone_moe": "K-EXAONE",
    "glm": "glm-4-9b",
    "glm4": "GLM-4-9B-0414",
    "glm4_moe": "GLM-4.5",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt_oss": "gpt-oss",
    "granitemoe": "granite-3.1-1b-a400m",
    "hunyuan_v1_moe": "Hunyuan-A13B",
    "kimi_k2": "Kimi-K2",
    "lfm2": "LFM2-1.2B",
    "lfm2_moe": "LFM2-8B-A1B",
    "llama4": "Llama-4",
    "llama4_text": "Llama-4",
    "minimax_m2": "MiniMax-M2",
    "mixtral": "Mixtral",
    "olmoe": "OLMoE",
    "phi3": "Phi-4",
    "phimoe": "Phi-3.5-MoE",
    "qwen2_moe": "Qwen1.5-MoE",
    "qwen3_5_moe": "Qwen3.5-35B-A3B",
    "qwen3_5_moe_text": "Qwen3.5-35B-A3B",
    "qwen3_moe": "Qwen3-30B-A3B",
    "qwen3_next": "Qwen3-Next",
}


def layers_of_model(path: str) -> Layers | None:
    """The layers of the model `path`, by its config.json where that is on this disk, else by its name. None where the
    usual names of a dense model are taken to be right."""
    name = path
    file = pathlib.Path(path).expanduser() / "config.json"
    if file.is_file():
        try:
            config = dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):  # check_model has refused it
            return None
        name = BY_TYPE.get(str(config.get("model_type")), path)
        if name.startswith("DeepSeek") and config.get("q_lora_rank") is None:
            name = "DeepSeek-V2-Lite"
    return next((layers for pattern, layers in BY_NAME if re.search(pattern, name, re.IGNORECASE)), None)


@dataclasses.dataclass(frozen=True)
class Targets:
    """Names of modules to adapt, and what is to be said of them."""

    names: tuple[str, ...]
    note: str = ""


def every_linear(layers: Layers, *, by_class: bool, converts: bool) -> Targets:
    """What a tool adapts that asks for all linear layers: by the names of the modules of that class (`by_class`), or by
    peft's all-linear; `converts`: its peft reads names of experts' matrices as the experts."""
    routed = layers.converted and converts and (layers.beside or not by_class)
    names = (*layers.linear, *([EXPERTS] * routed))
    if routed:
        return Targets(names, note="routed experts have adapters, as by peft from 0.19; routers have none")
    note = "routed experts have none, which since transformers 5 are no linear layers"
    return Targets(names, note=note + (", and shared experts have none either" if layers.beside else ""))


def named(names: list[str], layers: Layers, *, converts: bool) -> Targets:
    """What a tool adapts for a list of names; `converts`: its peft reads names of experts' matrices as the experts."""
    chosen: dict[str, None] = {}
    left_out: list[str] = []
    notes: dict[str, None] = {}
    known = {name.rpartition(".")[2]: name for name in layers.linear}
    for name in names:
        leaf = name.rpartition(".")[2]
        if layers.is_mixture and ("shared" in name or leaf in ROUTERS):
            left_out.append(name)
            notes["routers have no adapters here, nor shared experts without the routed ones"] = None
        elif layers.is_mixture and name in layers.experts and layers.converted and converts:
            chosen[EXPERTS] = None
            notes["the routed experts, as peft reads these names from 0.19"] = None
        elif name in USUAL and leaf in known:
            chosen[known[leaf]] = None
        elif layers.is_mixture and name in layers.experts:
            left_out.append(name)
            notes["routed experts have none, which since transformers 5 are no linear layers"] = None
        elif name in USUAL:
            left_out.append(name)
            notes["the model has no such modules, there or here"] = None
        else:
            chosen[name] = None
    note = "; ".join(notes)
    return Targets(tuple(chosen), f"without {', '.join(left_out)}: {note}" if left_out else note)
