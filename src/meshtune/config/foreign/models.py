"""Models by name: those that cannot be trained here, and the modules that get adapters.

Other tools ignore a name that no module of the model has. The modules of a mixture that they adapt follow from
transformers, which since 5.0 keeps the matrices of all experts in one parameter that is no linear layer, and from peft,
which since 0.19 reads the old names of those matrices (gate_proj) as that parameter, for the families marked
`converted`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

from meshtune.config.foreign.draft import Draft, entries, mapping, names, number, refused
from meshtune.errors import UserError
from meshtune.json_text import read_json

VISION = "it is a model of images, video or sound of a family that is not read here"
# Families whose pictures are read, by the names of their models, and by model_type.
SEES = (
    r"Qwen2-VL|Qwen2\.5-VL|Qwen3-VL|InternVL\d.*-hf|SmolVLM-|SmolVLM2|Idefics3|llava-1\.5|llava-v1\.6|GLM-4\.[156]V"
    r"|LFM2-VL|paligemma"
)
SEEING = """internvl idefics3 smolvlm qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe llava llava_next glm4v glm46v
    glm4v_moe lfm2_vl paligemma""".split()
OWN_CODE = "its code is in its repository, which is never run here"
PIXELS = refused("pictures are scaled by the model's own rules", "leave it out; or write vision: {max_pixels: ...}")
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


def sees(path: str) -> bool:
    """Whether a model is of a family whose pictures are read."""
    config = pathlib.Path(path).expanduser() / "config.json"
    if not config.is_file():
        return re.search(SEES, path, re.IGNORECASE) is not None
    try:
        return read_json(config).get("model_type") in SEEING
    except UserError:  # check_model has refused it
        return False


def put_vision(draft: Draft, key: str, freezes: str | None = None) -> None:
    """Writes what TRL and axolotl train of a model that sees, which `key` names: with adapters theirs adapt the tower
    too, and otherwise all parts are trained, unless the key `freezes` is set."""
    path = draft.get(key)
    if path is None or not sees(path):
        return
    if freezes is not None and draft.get(freezes):
        draft.put("vision.train", [], key, freezes, note="pictures of the data are read")
    elif draft.value("method.kind") == "full":
        draft.put("vision.train", ["projector", "tower"], key, note="pictures of the data are read")
    else:
        note = "pictures are read; the tower and the projector stay as they are, which the other tool adapts too"
        draft.put("vision.train", [], key, note=note, differs=True)


ONE_RATE = "only LoRA+, projector and tower have rates other than optimizer.learning_rate"
# Modules of families that see, by the part that they are of; a group's modules are parts of their names.
PARTS = {
    "projector": ("multi_modal_projector", "visual.merger", "connector"),
    "tower": ("vision_tower", "vision_model", "visual.blocks", "visual.patch_embed"),
}


def rate_groups(value: object) -> list[tuple[list[str], float]]:
    """The modules and the rate of each of axolotl's groups, {name, modules, lr}."""
    groups = [mapping(group) for group in entries(value)]
    return [(names(group.get("modules")), number(group.get("lr"))) for group in groups]


def put_part_rates(draft: Draft, key: str) -> None:
    """Writes the rates of groups of modules, each of which is of a part that is trained in full; refuses others."""
    rates: dict[str, float] = {}
    for modules, rate in draft.get(key) or ():
        parts = [
            part
            for part in draft.value("vision.train") or ()
            if modules and all(any(name in module for name in PARTS[part]) for module in modules)
        ]
        if not parts or parts[0] in rates:
            fix = f"leave it out, or name all of one part: {', '.join(PARTS['projector'])}; {', '.join(PARTS['tower'])}"
            draft.refuse(key, f"{ONE_RATE}, where they are trained in full", fix)
            return
        rates[parts[0]] = rate
    for part, rate in rates.items():
        draft.put(f"optimizer.{part}_learning_rate", rate, key)


def lacking(path: str) -> str | None:
    """Why a model cannot be trained here, or None where nothing is known against it."""
    config = pathlib.Path(path).expanduser() / "config.json"
    if config.is_file():
        return _of_config(config)
    if sees(path):
        return None
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
    experts. `shared`: linear layers outside the routed experts have those names too (shared experts, dense layers).
    """

    linear: tuple[str, ...]
    experts: tuple[str, ...] = ()
    converted: bool = False
    shared: bool = False

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
    (r"GLM-4\.7-Flash", Layers(LATENT, GATED, converted=True, shared=True)),
    (r"GLM-4\.[567]", Layers(ATTENTION, GATED, converted=True, shared=True)),
    (r"GLM-(4|Z1)-\d+B-|glm-4-9b|glm-edge", Layers((*ATTENTION, *FUSED[1:]))),
    (r"DeepSeek-(Coder-)?V2-Lite|Moonlight", Layers(LITE, GATED, converted=True, shared=True)),
    (r"DeepSeek-R1-Distill", Layers((*ATTENTION, *GATED))),
    (r"DeepSeek-(Coder-)?V[23]|DeepSeek-R1|Kimi-K2", Layers(LATENT, GATED, converted=True, shared=True)),
    (r"Mixtral", Layers(ATTENTION, NUMBERED, converted=True)),
    (r"MiniMax-M2", Layers(ATTENTION, NUMBERED, converted=True)),
    (r"OLMoE|Qwen3-(Coder-)?\d+B-A\d+B", Layers(ATTENTION, GATED, converted=True)),
    (r"Qwen3-Next", Layers((*ATTENTION, *NEXT_DELTA), GATED, converted=True, shared=True)),
    (r"Qwen3\.[56]-\d+B-A\d+B", Layers((*ATTENTION, *DELTA), GATED, shared=True)),
    (r"Qwen1\.5-MoE|Qwen2-57B", Layers(ATTENTION, GATED, shared=True)),
    (r"gpt-oss", Layers(ATTENTION, GATED)),
    (r"granite-3\.\d-\d+b-a\d+m", Layers(ATTENTION, GATED)),
    (r"granite-4\.0-(h-)?(tiny|small)", Layers((*ATTENTION, "mamba.in_proj", "mamba.out_proj"), GATED, shared=True)),
    (r"Llama-4", Layers(ATTENTION, GATED, shared=True)),
    (r"gemma-4-26B", Layers((*ATTENTION, *(f"mlp.{name}" for name in GATED)), GATED)),
    (r"LFM2-\d+B-A\d+B", Layers(CONVOLUTIONS, NUMBERED)),
    (r"LFM2-", Layers(CONVOLUTIONS)),
    (r"Nemotron-3", Layers((*ATTENTION, "mixer.in_proj"), GATED[1:], shared=True)),
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
            config = read_json(file)
        except UserError:  # check_model has refused it
            return None
        name = BY_TYPE.get(str(config.get("model_type")), path)
        if name.startswith("DeepSeek") and config.get("q_lora_rank") is None:
            name = "DeepSeek-V2-Lite"
    return next((layers for pattern, layers in BY_NAME if re.search(pattern, name, re.IGNORECASE)), None)


@dataclasses.dataclass(frozen=True)
class Targets:
    """Names of modules to adapt, with a note for the report."""

    names: tuple[str, ...]
    note: str = ""


def every_linear(layers: Layers, *, by_class: bool, converts: bool) -> Targets:
    """The modules that a tool adapts for all linear layers: by the names of the modules of that class (`by_class`), or
    by peft's all-linear; `converts`: its peft reads names of experts' matrices as the experts."""
    routed = layers.converted and converts and (layers.shared or not by_class)
    names = (*layers.linear, *([EXPERTS] * routed))
    if routed:
        return Targets(names, note="routed experts have adapters, as by peft from 0.19; routers have none")
    note = "routed experts have none, which since transformers 5 are no linear layers"
    return Targets(names, note=note + (", and shared experts have none either" if layers.shared else ""))


def match_names(names: list[str], layers: Layers, *, converts: bool) -> Targets:
    """The modules that a tool adapts for a list of names; `converts`: its peft reads names of experts' matrices as the
    experts."""
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


PAIRED = "gate and up of an expert have adapters of their own here, one for both there"


def put_targets(
    draft: Draft, chosen: list[str] | None, *keys: str, by_class: bool, converts: bool, experts: bool = False
) -> None:
    """Writes the modules to adapt, once the model is in the draft: `chosen` names, or every linear layer for None, and
    with `experts` the routed experts, which the file asks for by their parameters.

    `by_class`: the tool looks for linear layers by their class, not by peft's all-linear. `converts`: its peft reads
    names of experts' matrices as the routed experts.
    """
    expressions = [name for name in chosen or [] if re.search(r"[^\w.*-]", name)]
    if expressions:
        why = f"{', '.join(expressions)}: among several names an expression is compared as a name, there too"
        draft.refuse(keys[0], why, "list the modules' names")
        return
    model = draft.settings.get("model.path")
    layers = layers_of_model(str(model.value)) if model else None
    if layers is None or (chosen is None and not layers.is_mixture):
        selected = Targets(tuple(chosen or ()))
    elif chosen is None:
        selected = every_linear(layers, by_class=by_class, converts=converts)
    else:
        selected = match_names(chosen, layers, converts=converts)
    names = [name for name in selected.names if name != EXPERTS]
    routed = experts or EXPERTS in selected.names
    if chosen is None and not names:
        draft.put("method.targets", "all-linear", *keys)
        routed = False
    elif not names and not routed:
        draft.refuse(keys[0], f"{model.value if model else 'the model'}: {selected.note}", "name other modules")
        return
    else:
        note = "; ".join(filter(None, (selected.note, PAIRED if routed else "")))
        draft.put("method.targets", [*names, *([EXPERTS] * routed)], *keys, note=note, differs=bool(note))
    dropout = draft.settings.get("method.dropout")
    if routed and dropout is not None and dropout.value:
        note = "adapters on experts have none, there or here, and here all of a run have one rate"
        draft.put("method.dropout", 0.0, "lora_dropout", note=note, differs=True)


BLOCKS = ("mlp", "self_attn", "attention", "linear_attn", "feed_forward", "block_sparse_moe", "attn")
ANY_LAYER = re.compile(r"^(?:\*|[\w*.]*?\.)?layers\.\*\.(?P<block>\w+)\.(?P<leaf>[\w.]+)$")
OF_ALL = re.compile(r"^\*\.?(?:(?P<block>mlp|self_attn)\.)?(?P<leaf>\w+)$")
LIMIT = 4096
OTHER_TOWERS = ("cross_attn", "vision", "visual", "audio", "projector")


class NotExpandableError(ValueError):
    """A regular expression that is more than alternatives of names."""


def is_expression(text: str) -> bool:
    """Whether a text is an expression and not the name of one module."""
    return any(letter in text for letter in "\\[(|*+?^$") or text == "all-linear"


def names_of(expression: str) -> list[str]:
    """The names and patterns that `expression` matches in the language model; other towers are left out.

    Raises NotExpandableError where it is more than names, alternatives, digits and wildcards.
    """
    texts, remaining = _alternatives(expression.strip().removeprefix("^").removesuffix("$"))
    if remaining:
        raise NotExpandableError(f"'{remaining[:20]}' in it is not a name, an alternative or a wildcard")
    chosen: dict[str, None] = {}
    for text in texts:
        if not any(tower in text for tower in OTHER_TOWERS) and "_checkpoint_wrapped_module" not in text:
            chosen[_short(text)] = None
    if not chosen:
        raise NotExpandableError("it selects nothing of the language model")
    return list(chosen)


def _short(text: str) -> str:
    """Returns only the name if a pattern means it in every layer: a name matches all modules with that name."""
    match = ANY_LAYER.match(text) or OF_ALL.match(text)
    if match and (match["block"] is None or match["block"] in BLOCKS):
        return match["leaf"]
    return text.removeprefix("*.").replace("model.language_model.", "*").replace("language_model.model.", "*")


def _alternatives(remaining: str) -> tuple[list[str], str]:
    """Returns the texts that an expression matches up to its end or a closing bracket, and the remaining text."""
    options: list[str] = []
    current = [""]
    while remaining and remaining[0] != ")":
        if remaining[0] == "|":
            options, current, remaining = options + current, [""], remaining[1:]
            continue
        pieces, remaining = _piece(remaining)
        current = [text + piece for text in current for piece in pieces]
        if len(current) + len(options) > LIMIT:
            raise NotExpandableError("it stands for too many names")
    return options + current, remaining


def _piece(remaining: str) -> tuple[list[str], str]:
    """Returns the texts of the next element, and the remaining text."""
    if remaining[0] == "(":
        inner, remaining = _alternatives(remaining[3:] if remaining.startswith("(?:") else remaining[1:])
        if not remaining:
            raise NotExpandableError("a bracket is not closed")
        return _repeat_group(inner, remaining[1:])
    if match := re.match(r"(\\d|\[\\d\]|\[0-9\])[+*]?|\.[*+]", remaining):
        return ["*"], remaining[match.end() :]
    if match := re.match(r"\[(\d)-(\d)\]\+?|\[(\w+)\]", remaining):
        letters = match[3] or "".join(map(str, range(int(match[1]), int(match[2]) + 1)))
        return list(letters), remaining[match.end() :]
    if remaining.startswith("\\.") or remaining[0] == ".":
        return ["."], remaining.removeprefix("\\")[1:]
    if match := re.match(r"[\w-]+", remaining):
        word = match[0]
        if remaining[match.end() : match.end() + 1] in ("?", "*", "+"):
            raise NotExpandableError(f"'{word[-1]}{remaining[match.end()]}' in it repeats a letter")
        return [word], remaining[match.end() :]
    raise NotExpandableError(f"'{remaining[:20]}' in it is not a name, an alternative or a wildcard")


def _repeat_group(inner: list[str], remaining: str) -> tuple[list[str], str]:
    if remaining[:1] == "?":
        return [*inner, ""], remaining[1:]
    if remaining[:1] in ("*", "+", "{"):
        raise NotExpandableError("a group in it is repeated")
    return inner, remaining
