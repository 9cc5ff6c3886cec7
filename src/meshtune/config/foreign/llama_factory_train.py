"""A LLaMA-Factory training file (v0) as a recipe: what one table entry alone cannot say."""

from __future__ import annotations

from meshtune.config.foreign import models, trainer
from meshtune.config.foreign.adapted import put_targets
from meshtune.config.foreign.draft import ONE_TEXT, OTHER_ORDER, Draft
from meshtune.config.foreign.llama_factory import SHARING
from meshtune.config.foreign.llama_factory_data import sources
from meshtune.config.foreign.rules import ABSENT
from meshtune.config.foreign.streams import stream
from meshtune.config.foreign.trainer import dropout

CLIPPED = "the file's max_grad_norm is for updates after the backward pass"


def train(draft: Draft) -> None:
    """Translates a file with do_train. Raises nothing: what cannot be done is refused in `draft`."""
    model(draft)
    kind = stage(draft)
    _method(draft, kind)
    quantize(draft)
    _optimizer(draft)
    validation = sources(draft, kind)
    trainer.trainer_settings(draft, validation=validation, kind=kind, sharing=SHARING)
    stream(draft, "streaming", "buffer_size")
    _precision(draft)
    if draft.get("early_stopping_steps"):
        draft.put("eval.early_stopping", draft.get("early_stopping_steps"), "early_stopping_steps")
    draft.remark(OTHER_ORDER)
    draft.remark(ONE_TEXT)


def model(draft: Draft) -> None:
    path = draft.get("model_name_or_path")
    if path is None:
        draft.refuse("model_name_or_path", "the file names no model", "add model_name_or_path")
        return
    models.check_model(draft, "model_name_or_path", path)
    draft.put("model.path", path, "model_name_or_path")
    if draft.get("model_revision") != "main":
        draft.put("model.revision", draft.get("model_revision"), "model_revision")
    for key, ours in (("add_tokens", "new_tokens"), ("add_special_tokens", "new_special_tokens")):
        if draft.get(key):
            draft.put(f"model.{ours}", draft.get(key), key)
    if draft.get("resize_vocab"):
        draft.put("model.pad_vocab_to", 64, "resize_vocab", note="rows are rounded up to a multiple of 64")
    if draft.get("adapter_folder"):
        draft.refuse("adapter_folder", "an adapter is named by its own path", "join it with adapter_name_or_path")
    adapters = draft.get("adapter_name_or_path")
    if adapters:
        merged = adapters if draft.get("create_new_adapter") else adapters[:-1]
        if merged:
            draft.put("model.merge_adapters", merged, "adapter_name_or_path", "create_new_adapter")
        if not draft.get("create_new_adapter"):
            draft.put("model.adapter", adapters[-1], "adapter_name_or_path", note="its training goes on")


def stage(draft: Draft) -> str:
    """The stage and its own keys; our name of it."""
    name, loss = str(draft.get("stage")), str(draft.get("pref_loss"))
    if name not in ("sft", "pt", "rm", "dpo", "kto"):
        fix = "online reinforcement learning has recipes of its own" if name == "ppo" else "use sft, pt, rm, dpo or kto"
        draft.refuse("stage", f"there is no stage {name} in recipes here", fix)
        return "sft"
    kind = loss if name == "dpo" and loss in ("orpo", "simpo") else name
    draft.put("stage.kind", kind, "stage", *(["pref_loss"] if kind != name else []))
    if kind == "sft" and draft.get("use_dft_loss"):
        draft.put("stage.loss", "dft", "use_dft_loss")
    if name == "dpo" and kind == "dpo":
        _dpo(draft, loss)
    elif kind == "simpo":
        draft.put("stage.beta", draft.get("pref_beta"), "pref_beta")
        draft.put("stage.gamma", draft.get("simpo_gamma"), "simpo_gamma")
    elif kind == "orpo":
        draft.put("stage.beta", draft.get("pref_beta"), "pref_beta")
    elif kind == "kto":
        draft.put("stage.beta", draft.get("pref_beta"), "pref_beta")
        draft.put("stage.desirable_weight", draft.get("kto_chosen_weight"), "kto_chosen_weight")
        draft.put("stage.undesirable_weight", draft.get("kto_rejected_weight"), "kto_rejected_weight")
    if kind in ("dpo", "orpo", "simpo"):
        put_sft_term(draft, kind)
    if kind in ("dpo", "kto") and draft.get("ref_model"):
        draft.put("stage.reference", draft.get("ref_model"), "ref_model")
    return kind


def put_sft_term(draft: Draft, kind: str) -> None:
    """Writes the cross-entropy of the chosen answers, which LLaMA-Factory averages over pairs."""
    weight = draft.get("pref_ftx")
    if kind == "orpo":
        if weight:
            draft.refuse("pref_ftx", "orpo has a cross-entropy term of weight 1", "leave it out, or use simpo")
        draft.put("stage.sft_mean", "pairs", note="an answer's loss is its own mean, whatever its length")
    elif weight:
        draft.put("stage.sft_weight", weight, "pref_ftx")
        draft.put("stage.sft_mean", "pairs", "pref_ftx", note="an answer's loss is its own mean, whatever its length")


def _dpo(draft: Draft, loss: str) -> None:
    if loss not in ("sigmoid", "hinge", "ipo"):
        draft.refuse("pref_loss", f"there is no loss {loss} here", "use sigmoid, hinge, ipo, orpo or simpo")
        return
    draft.put("stage.beta", draft.get("pref_beta"), "pref_beta")
    note = "" if loss == "sigmoid" else "release 0.9.5 with trl 0.24 computes sigmoid, whatever the loss"
    draft.put("stage.loss", loss, "pref_loss", note=note, differs=bool(note))
    if draft.get("dpo_label_smoothing"):
        draft.put("stage.label_smoothing", draft.get("dpo_label_smoothing"), "dpo_label_smoothing")
    if draft.get("ld_alpha") is not None:
        draft.put("stage.ld_alpha", draft.get("ld_alpha"), "ld_alpha")


def _method(draft: Draft, kind: str) -> None:
    name = draft.get("finetuning_type")
    if name == "full":
        draft.put("method.kind", "full", "finetuning_type")
    elif name == "freeze":
        _freeze(draft)
    elif name in ("lora", "oft"):
        if draft.get("use_llama_pro"):
            draft.refuse("use_llama_pro", "adapters on new layers alone are not here", "use method: llama_pro")
        draft.put("method.kind", "lora", "finetuning_type")
        _oft(draft) if name == "oft" else _lora(draft, kind)
        if draft.get("additional_target"):
            draft.put("method.train_modules", draft.get("additional_target"), "additional_target")
    else:
        draft.refuse("finetuning_type", f"there is no method {name} here", "use lora, oft, freeze or full")


def _freeze(draft: Draft) -> None:
    layers, modules = draft.get("freeze_trainable_layers"), draft.get("freeze_trainable_modules")
    chosen = [] if modules in ("all", ["all"]) else list(modules)
    draft.put("method.kind", "freeze", "finetuning_type")
    if draft.get("use_llama_pro"):
        _new_layers(draft, layers, chosen)
        return
    side = "last_layers" if layers > 0 else "first_layers"
    draft.put(f"method.{side}", abs(layers), "freeze_trainable_layers")
    extra = draft.get("freeze_extra_modules") or []
    if chosen or extra:
        draft.put("method.modules", [*chosen, *extra], "freeze_trainable_modules", "freeze_extra_modules")
    else:
        draft.idle("freeze_trainable_modules", "all modules of these layers, as here")


def _new_layers(draft: Draft, blocks: int, modules: list[str]) -> None:
    """LLaMA Pro in LLaMA-Factory trains every nth layer of a model that a script has expanded before."""
    total = models.layers_of(str(draft.get("model_name_or_path")))
    if total is None or modules or total % blocks:
        draft.refuse(
            "use_llama_pro",
            "the model has been expanded by a script, and which layers are new follows from their number in its "
            "config.json, which is not on this disk",
            f"set model.path to the model before that, and method: {{kind: llama_pro, blocks: {blocks}}}",
        )
        return
    new = [f"layers.{layer}" for layer in range(total // blocks - 1, total, total // blocks)]
    keys = ("freeze_trainable_layers", "use_llama_pro", "freeze_trainable_modules")
    draft.put("method.modules", new, *keys, note="the layers that the script has added")


def _lora(draft: Draft, kind: str) -> None:
    rank, alpha = draft.get("lora_rank"), draft.get("lora_alpha")
    adapter = "dora" if draft.get("use_dora") else "pissa" if draft.get("pissa_init") else "lora"
    draft.put("method.adapter", adapter, "use_dora", "pissa_init")
    draft.put("method.rank", rank, "lora_rank")
    note = "" if alpha is not None else "twice the rank"
    draft.put("method.alpha", float(2 * rank if alpha is None else alpha), "lora_alpha", note=note)
    dropout(draft, compared=kind in ("dpo", "orpo", "simpo", "kto"))
    targets(draft, "lora_target")
    if draft.get("use_rslora"):
        draft.put("method.rslora", True, "use_rslora")
    if adapter == "pissa":
        iterations = draft.get("pissa_iter")
        draft.put("method.svd_iterations", None if iterations < 0 else iterations, "pissa_iter")
        draft.put("method.pissa_convert", bool(draft.get("pissa_convert")), "pissa_convert")
        if not draft.get("pissa_convert") and iterations >= 0:
            note = "a plain LoRA is written, since peft could not repeat a randomised decomposition"
            draft.put("method.pissa_convert", True, "pissa_convert", note=note, differs=True)
    if draft.get("loraplus_lr_ratio"):
        draft.put("optimizer.lora_plus_ratio", draft.get("loraplus_lr_ratio"), "loraplus_lr_ratio")
        if draft.get("additional_target"):
            rate = draft.get("loraplus_lr_embedding")
            draft.put("optimizer.lora_plus_embedding_rate", rate, "loraplus_lr_embedding")


def _oft(draft: Draft) -> None:
    draft.put("method.adapter", "oft", "finetuning_type")
    if draft.get("oft_rank"):
        draft.refuse("oft_rank", "oft is sized by its blocks here", "give oft_block_size: inputs / oft_rank")
    draft.put("method.oft_block_size", draft.get("oft_block_size"), "oft_block_size")
    targets(draft, "oft_target")


def targets(draft: Draft, key: str) -> None:
    chosen = draft.get(key)
    everything = chosen in ("all", ["all"], "all-linear", ["all-linear"])
    put_targets(draft, None if everything else chosen, key, by_class=True, converts=False)


def quantize(draft: Draft) -> None:
    bits = draft.get("quantization_bit")
    if bits is None:
        return
    method, kind = draft.get("quantization_method"), draft.get("quantization_type")
    if method not in ("bnb", "bitsandbytes") or bits not in (4, 8):
        key = "quantization_method" if method not in ("bnb", "bitsandbytes") else "quantization_bit"
        draft.refuse(key, f"{draft.given.get(key)} is not a way to quantise a base here", "use bnb with 4 or 8 bits")
    elif bits == 4 and kind != "nf4":
        draft.refuse("quantization_type", f"{kind} is not written here", "use nf4")
    elif bits == 8:
        note = "8 bits in blocks in place of LLM.int8(), which keeps outliers apart"
        draft.put("quantize.format", "int8", "quantization_bit", "quantization_method", note=note, differs=True)
    else:
        keys = ("quantization_bit", "quantization_method", "quantization_type")
        draft.put("quantize.format", "nf4", *keys)
        draft.put("quantize.block_size", 64, note="bitsandbytes' block")
        draft.put("quantize.double", draft.get("double_quantization"), "double_quantization")


def _optimizer(draft: Draft) -> None:
    """Optimizers that have switches of their own; at most one, as in LLaMA-Factory."""
    if draft.get("use_galore"):
        _low_rank(draft, "galore", scale="galore_scale")
    elif draft.get("use_apollo"):
        _low_rank(draft, "apollo", scale="apollo_scale")
        draft.put("optimizer.scaling", draft.get("apollo_scale_type"), "apollo_scale_type")
    elif draft.get("use_badam"):
        draft.put("optimizer.name", "badam", "use_badam")
        draft.put("optimizer.switch_every", draft.get("badam_switch_interval"), "badam_switch_interval")
        draft.put("optimizer.block_order", draft.get("badam_switch_mode"), "badam_switch_mode")
    elif draft.get("use_adam_mini"):
        draft.put("optimizer.name", "adam_mini", "use_adam_mini")
    elif draft.get("use_muon"):
        note = "matrices by Muon at the RMS of AdamW's updates, all else by AdamW, in both"
        draft.put("optimizer.name", "muon", "use_muon", note=note)


def _low_rank(draft: Draft, name: str, scale: str) -> None:
    draft.put("optimizer.name", name, f"use_{name}")
    projected = draft.get(f"{name}_target")
    if projected not in ("all", ["all"]):
        draft.refuse(f"{name}_target", "all matrices are projected here", "use all")
    draft.put("optimizer.rank", draft.get(f"{name}_rank"), f"{name}_rank", f"{name}_target")
    draft.put("optimizer.update_gap", draft.get(f"{name}_update_interval"), f"{name}_update_interval")
    draft.put("optimizer.scale", float(draft.get(scale)), scale)
    if draft.get(f"{name}_layerwise"):
        draft.put("optimizer.in_backward", True, f"{name}_layerwise", note="each layer is updated as its gradient is")


def _precision(draft: Draft) -> None:
    if draft.get("pure_bf16"):
        draft.put("compute.precision", "bfloat16", "pure_bf16")
    elif "compute.precision" not in draft.settings and draft.table["bf16"].default is ABSENT:
        note = "neither bf16 nor fp16 is asked for, and what is trained is kept in float32"
        draft.put("compute.precision", "mixed", note=note)
    elif draft.given.get("bf16") is False and not draft.get("fp16"):
        note = (
            "LLaMA-Factory computes in the checkpoint's dtype; here in bfloat16, with float32 copies of what is trained"
        )
        draft.put("compute.precision", "mixed", "bf16", note=note, differs=True)
