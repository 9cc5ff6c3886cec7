"""The linear layers of families whose adapters need more than names: mixtures of experts, and layers of other names.

Other tools ignore a name that no module of the model has. What they adapt of a mixture follows from transformers,
which since 5.0 keeps the matrices of all experts in one parameter that is no linear layer, and from peft, which since
0.19 reads the old names of those matrices (gate_proj) as that parameter, for the families marked `converted`.
"""

from __future__ import annotations

import dataclasses
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


def layers_of_model(path: str) -> Layers | None:
    """The layers of the model `path`; None where the usual names of a dense model are taken to be right."""
    return next((layers for pattern, layers in BY_NAME if re.search(pattern, path, re.IGNORECASE)), None)


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
