"""LLaMA-Factory's files of other verbs (v0): export, inference and prediction, as commands."""

from __future__ import annotations

import json
import pathlib

from meshtune.config.foreign import models
from meshtune.config.foreign.draft import Draft
from meshtune.config.foreign.llama_factory import TRAIN
from meshtune.config.foreign.rules import ABSENT, Table, flag, idle, integer, names, number, part, text
from meshtune.config.foreign.templates import LLAMA_FACTORY

TRAINING = "only training reads it"
SAMPLING: Table = {
    "do_sample": part("--temperature", flag, True, "true: answers are sampled"),
    "temperature": part("--temperature", number, 0.95),
    "top_p": part("--top-p", number, 0.7),
    "top_k": part("--top-k", integer, 50),
    "repetition_penalty": part("--repetition-penalty", number, 1.0),
    "max_new_tokens": part("--max-tokens", integer, 1024),
    **idle("answers end at the end of a turn, and special tokens are left out", "skip_special_tokens length_penalty"),
}
COMMAND: Table = {
    **{
        key: rule if rule.kind == "refused" else part("", rule.read, rule.default, TRAINING)
        for key, rule in TRAIN.items()
    },
    **{key: rule for key, rule in TRAIN.items() if rule.kind == "idle" and not rule.note.startswith("only ")},
    "stage": part("", text, "sft", "which verb is meant follows from the other keys"),
    "finetuning_type": part("", text, "lora", "an adapter says itself what it is"),
    "template": part("--chat-template", text, ABSENT, "weights alone are read"),
    "infer_backend": part("", text, "huggingface", "decoding is Meshtune's own"),
    "export_size": part("--max-shard-size", number, 5),
    "export_device": part("", text, ABSENT, "weights are merged on the host"),
    "export_legacy_format": part("", flag, False, "false: safetensors are written"),
    "export_dir": part("--to", text),
    "export_hub_model_id": part("", text, ABSENT, "an export uploads nothing: the files lie in --to"),
    "export_quantization_bit": part("", integer),
    **idle("only a quantised export reads it", "export_quantization_dataset export_quantization_nsamples"),
    **idle("only a quantised export reads it", "export_quantization_maxlen"),
    "infer_dtype": part("--dtype", text, "auto", "auto: by device"),
    "output_dir": part("--output", text, ABSENT, TRAINING),
    "overwrite_output_dir": part("--overwrite", flag, False, "false: results that are there stay"),
    "per_device_eval_batch_size": part("--rows", integer, 8, "only predictions read it"),
    "eval_dataset": part("--data", names, ABSENT, "only predictions read it"),
    "max_samples": part("--limit", integer, ABSENT, "only predictions read it"),
    **SAMPLING,
}


def export(draft: Draft) -> None:
    """`meshtune export`: an adapter merged into its base, or a whole model."""
    path = _base(draft)
    adapters = draft.get("adapter_name_or_path") or []
    if draft.get("export_quantization_bit"):
        draft.refuse(
            "export_quantization_bit", "an export is not calibrated to GPTQ here", "export it whole, and quantise that"
        )
    if draft.get("export_legacy_format"):
        draft.refuse("export_legacy_format", "pickled files are never written", "use false: safetensors")
    if len(adapters) > 1:
        draft.refuse("adapter_name_or_path", "one adapter is merged at a time", "merge them one after the other")
    if adapters:
        draft.put("SOURCE", adapters[0], "adapter_name_or_path")
        draft.put("--merge", True, "adapter_name_or_path")
        draft.put("--base", path, "model_name_or_path")
    else:
        draft.put("SOURCE", path, "model_name_or_path")
    draft.put("--to", draft.get("export_dir"), "export_dir")
    draft.put("--max-shard-size", f"{draft.get('export_size'):g}GB", "export_size")
    if draft.get("infer_dtype") in ("float32", "bfloat16"):
        draft.put("--dtype", draft.get("infer_dtype"), "infer_dtype")


def chat(draft: Draft) -> None:
    """`meshtune chat`, with the sampling of LLaMA-Factory."""
    _loaded(draft)
    _sampled(draft)


def predict(draft: Draft) -> None:
    """`meshtune predict`, once for each data set."""
    _loaded(draft)
    _sampled(draft)
    chosen = draft.get("eval_dataset") or []
    if not chosen:
        draft.refuse("eval_dataset", "the file names no data to answer", "add eval_dataset")
    files = [_file(draft, name) for name in chosen]
    if all(files):
        draft.put("--data", files, "eval_dataset", "dataset_dir", note="once for each")
    if draft.get("max_samples"):
        draft.put("--limit", draft.get("max_samples"), "max_samples")
    if draft.get("output_dir"):
        draft.put("--output", draft.get("output_dir"), "output_dir", note="a folder within for each data set")
    if draft.get("overwrite_output_dir"):
        draft.put("--overwrite", True, "overwrite_output_dir")
    draft.put("--rows", draft.get("per_device_eval_batch_size") * draft.devices, "per_device_eval_batch_size")
    draft.put("--metrics", "llamafactory", note="LLaMA-Factory's own BLEU-4 and ROUGE")


def _base(draft: Draft) -> str:
    path = draft.get("model_name_or_path")
    if path is None:
        draft.refuse("model_name_or_path", "the file names no model", "add model_name_or_path")
        return ""
    models.check_model(draft, "model_name_or_path", path)
    return path


def _loaded(draft: Draft) -> None:
    draft.put("SOURCE", _base(draft), "model_name_or_path")
    adapters = draft.get("adapter_name_or_path") or []
    if len(adapters) > 1:
        draft.refuse("adapter_name_or_path", "one adapter is put on a model here", "merge the others first")
    elif adapters:
        draft.put("--adapter", adapters[0], "adapter_name_or_path")
    if draft.get("quantization_bit") in (4, 8):
        draft.put("--quantize", {4: "nf4", 8: "int8"}[draft.get("quantization_bit")], "quantization_bit")
    entry = LLAMA_FACTORY.get(str(draft.get("template")))
    if draft.get("template") is None:
        return
    if entry is None or not entry.name:
        draft.differ("template", "the tokenizer's own template is used")
    else:
        draft.put("--chat-template", entry.name, "template")
        if entry.system:
            draft.put("--system", entry.system, "template", note="the template's own")


def _sampled(draft: Draft) -> None:
    if draft.get("do_sample"):
        for key in ("temperature", "top_p", "top_k"):
            draft.put(f"--{key.replace('_', '-')}", draft.get(key), key)
    else:
        draft.put("--temperature", 0.0, "do_sample")
    if draft.get("repetition_penalty") != 1:
        draft.put("--repetition-penalty", draft.get("repetition_penalty"), "repetition_penalty")
    draft.put("--max-tokens", draft.get("max_new_tokens"), "max_new_tokens")


def _file(draft: Draft, name: str) -> str | None:
    """The file or hub data set of a registry's entry, since `meshtune predict` reads files."""
    folder = pathlib.Path(str(draft.get("dataset_dir")))
    listed = folder / "dataset_info.json"
    if not listed.is_file():
        draft.refuse(
            "eval_dataset",
            f"predictions are of files, and the registry {listed} that says which one '{name}' is cannot be read",
            "run this where that folder is",
        )
        return None
    try:
        entry = json.loads(listed.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError, RecursionError) as problem:
        draft.refuse("eval_dataset", f"the registry {listed} cannot be read: {problem}", "correct that file")
        return None
    if not isinstance(entry, dict) or not (entry.get("file_name") or entry.get("hf_hub_url")):
        draft.refuse("eval_dataset", f"{listed} has no file or hub data set for '{name}'", "name the file")
        return None
    return str(folder / entry["file_name"]) if entry.get("file_name") else str(entry["hf_hub_url"])
