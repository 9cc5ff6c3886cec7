"""The method of an axolotl file: adapters and their targets, single modules, and the base in few bits."""

from __future__ import annotations

from meshtune.config.foreign.adapted import put_targets
from meshtune.config.foreign.draft import Draft
from meshtune.config.foreign.targets import NotExpandableError, is_expression, names_of
from meshtune.config.foreign.trainer import dropout


def method(draft: Draft) -> None:
    adapter = draft.get("adapter")
    if adapter is None:
        if draft.get("unfrozen_parameters"):
            _unfrozen(draft)
        else:
            draft.put("method.kind", "full", note="no adapter is named")
        return
    if adapter not in ("lora", "qlora"):
        draft.refuse("adapter", f"there is no adapter {adapter} here", "use lora or qlora")
        return
    draft.put("method.kind", "lora", "adapter")
    kind = "dora" if draft.get("peft_use_dora") else "lora"
    if (draft.get("peft") or {}).get("loftq_config"):
        kind = "loftq"
    if draft.get("peft_init_lora_weights") not in (None, True):
        draft.refuse(
            "peft_init_lora_weights", "write the kind of adapter itself", "use peft_use_dora or method.adapter"
        )
    draft.put("method.adapter", kind, *({"dora": ["peft_use_dora"], "loftq": ["peft"]}.get(kind, [])))
    draft.put("method.rank", draft.get("lora_r"), "lora_r")
    draft.put("method.alpha", float(draft.get("lora_alpha")), "lora_alpha")
    dropout(draft, compared=bool(draft.get("rl") or draft.get("reward_model")))
    _targets(draft)
    if draft.get("peft_use_rslora"):
        draft.put("method.rslora", True, "peft_use_rslora")
    if draft.get("lora_modules_to_save"):
        draft.put("method.train_modules", draft.get("lora_modules_to_save"), "lora_modules_to_save")
    if draft.get("loraplus_lr_ratio"):
        draft.put("optimizer.lora_plus_ratio", draft.get("loraplus_lr_ratio"), "loraplus_lr_ratio")
        if draft.get("lora_modules_to_save") or "loraplus_lr_embedding" in draft.given:
            rate = draft.get("loraplus_lr_embedding")
            draft.put("optimizer.lora_plus_embedding_rate", rate, "loraplus_lr_embedding")
    if draft.get("lora_model_dir"):
        draft.put("model.adapter", draft.get("lora_model_dir"), "lora_model_dir", note="its training goes on")


def _targets(draft: Draft) -> None:
    chosen, linear = draft.get("lora_target_modules"), draft.get("lora_target_linear")
    names = list(chosen) if isinstance(chosen, list) else []
    if isinstance(chosen, str):
        try:
            names = names_of(chosen) if is_expression(chosen) else [chosen]
        except NotExpandableError as problem:
            draft.refuse("lora_target_modules", f"the expression: {problem}", "list the modules' names instead")
            return
    towers = [name for name in names if "vision" in name]
    if towers:
        draft.refuse(
            "lora_target_modules", f"{', '.join(towers)} is of a vision tower, which stays as it is", "leave it out"
        )
        return
    parameters = draft.get("lora_target_parameters")
    if not names and not linear and not parameters:
        draft.refuse("lora_target_modules", "the file names no modules", "add lora_target_linear: true")
        return
    keys = ["lora_target_linear"] if linear else []
    keys += ["lora_target_modules", "lora_target_parameters"]
    put_targets(draft, None if linear else names, *keys, by_class=True, converts=True, experts=bool(parameters))


def _unfrozen(draft: Draft) -> None:
    """Patterns over parameters: the modules that they begin with."""
    patterns = [str(pattern) for pattern in draft.get("unfrozen_parameters")]
    try:
        names = [name for pattern in patterns for name in names_of(pattern.removesuffix(".*"))]
    except NotExpandableError as problem:
        draft.refuse("unfrozen_parameters", f"the expression: {problem}", "use method: freeze with names of modules")
        return
    if any("[" in pattern and ":" in pattern for pattern in patterns):
        draft.refuse("unfrozen_parameters", "single rows of a weight are not trained", "name whole modules")
        return
    names = [name.removesuffix(".weight").removesuffix("*").removesuffix(".") for name in names]
    all_of_it = {"model", "model.language_model", "", "language_model"} & set(names)
    if all_of_it:
        note = "the language model is all that is trained here; towers beside it stay as they are"
        draft.put("method.kind", "full", "unfrozen_parameters", note=note)
    else:
        draft.put("method.kind", "freeze", "unfrozen_parameters")
        draft.put("method.modules", list(dict.fromkeys(names)), "unfrozen_parameters")


def quantize(draft: Draft) -> None:
    if draft.get("adapter") is None or "quantize.format" in draft.settings:
        return
    loftq = (draft.get("peft") or {}).get("loftq_config")
    if loftq and not draft.get("load_in_4bit") and not draft.get("load_in_8bit"):
        note = "the base in the codes whose errors the adapters begin with; there in the numbers that they stand for"
        draft.put("quantize.format", "nf4", "peft", note=note, differs=True)
    elif draft.get("load_in_4bit"):
        draft.put("quantize.format", "nf4", "load_in_4bit")
        draft.put("quantize.block_size", 64, note="bitsandbytes' block")
        options = dict(draft.get("bnb_config_kwargs") or {})
        double = options.pop("bnb_4bit_use_double_quant", True)
        if options:
            draft.refuse("bnb_config_kwargs", f"{', '.join(options)}: nothing here does that", "leave it out")
        draft.put("quantize.double", double, "bnb_config_kwargs")
    elif draft.get("load_in_8bit"):
        note = "8 bits in blocks in place of LLM.int8(), which keeps outliers apart"
        draft.put("quantize.format", "int8", "load_in_8bit", note=note, differs=True)
