"""torchtune's data sets: what each component comes to here."""

from __future__ import annotations

from typing import Any

from meshtune.config.foreign.draft import Draft
from meshtune.config.foreign.rules import integer

COMPONENT = "_component_"


def component_of(draft: Draft, key: str) -> str:
    """The name of the component of a key; empty where it is none."""
    value = draft.get(key)
    return str(value.get(COMPONENT, "")) if isinstance(value, dict) else ""


def sources(draft: Draft, kind: str, model: str) -> bool:
    """Translates the data of stage `kind`. Returns whether there are validation data."""
    configs = draft.get("dataset")
    configs = configs if isinstance(configs, list) else [configs]
    for position, config in enumerate(configs):
        if isinstance(config, dict):
            _source(draft, "dataset", f"data.train.{position}", dict(config), kind)
        else:
            draft.refuse("dataset", "it is no component", "give _component_ and its arguments")
    validation = draft.get("dataset_val") if draft.get("run_val_every_n_steps") else None
    if validation:
        _source(draft, "dataset_val", "data.validation.0", dict(validation), kind)
    tokenizer = dict(draft.get("tokenizer") or {})
    longest = draft.pop("tokenizer", tokenizer, "max_seq_len", integer)
    if longest is None:
        note = "max_seq_len: null cuts nothing; a longer record is an error here, and then this is to be raised"
        draft.put("data.max_length", 4096, "tokenizer", note=note, differs=True)
        draft.put("data.overlong", "error", "tokenizer")
    else:
        draft.put("data.max_length", longest, "tokenizer", note="max_seq_len")
    if "llama4" in model:
        tokenizer.pop("max_num_tiles", None)
        tokenizer.pop("image_size", None)
    draft.refuse_unread("tokenizer", tokenizer, "path", "merges_file", "vocab_path", "merges_path")
    if kind != "pt":
        llama3 = "llama3" in component_of(draft, "tokenizer")
        note = (
            "torchtune also learns an end of text after the last turn" if llama3 else "the tokenizer's own template is "
            "used: compare what is trained with `meshtune data inspect`"
        )  # fmt: skip
        if llama3:
            draft.put("model.chat_template", "llama3", "tokenizer", note=note, differs=True)
        else:
            draft.differ("tokenizer", note)
    return bool(validation)


def _source(draft: Draft, key: str, to: str, config: dict[str, Any], kind: str) -> None:
    name = str(config.pop(COMPONENT, "")).rpartition(".")[2]
    reader = DATASETS.get(name)
    if reader is None or (kind == "dpo") != (name == "preference_dataset"):
        draft.refuse(key, f"{name}: its prompts are not written here", "write records as messages: chat_dataset")
        return
    if config.get("column_map") is not None and not isinstance(config["column_map"], dict):
        draft.refuse(key, "column_map: must be a mapping of names", "correct column_map")
        return
    path, fields, on_prompt = reader(config)
    if path in ("json", "csv", "parquet", "text") and config.get("data_files") is not None:
        path = config.pop("data_files")
    draft.put(f"{to}.path", path, key, note=name)
    for ours, value in fields.items():
        draft.put(f"{to}.{ours}", value, key)
    for theirs, ours in (("split", "split"), ("name", "subset"), ("subset", "subset")):
        if (value := config.pop(theirs, None)) is not None:
            draft.put(f"{to}.{ours}", value, key)
    system = config.pop("new_system_prompt", None)
    if system:
        draft.put("data.system", system, key)
    if kind == "sft":
        draft.put("data.train_on_prompt", bool(config.pop("train_on_input", on_prompt)), key)
    packed = bool(config.pop("packed", False))
    if key == "dataset":
        note = "rows are filled in another order" if packed else "one document a row"
        draft.put("data.packing", packed, key, note=note, differs=packed)
    if config.get("add_eos") is False:
        draft.refuse(key, "add_eos: false: an end of text follows every document here", "leave add_eos out")
    draft.refuse_unread(key, config, "train_on_input", "split_across_pack", "add_eos")


def _alpaca(config: dict[str, Any], source: str) -> tuple[str, dict[str, Any], bool]:
    fields: dict[str, Any] = {"format": "stanford_alpaca", "tags": {"turns": "chat"}}
    if columns := config.pop("column_map", None):
        fields["columns"] = columns
    return config.pop("source", source), fields, True


def _chat(config: dict[str, Any], source: str = "", style: str = "") -> tuple[str, dict[str, Any], bool]:
    style = config.pop("conversation_style", style)
    form, field = ("messages", "messages") if style == "openai" else ("sharegpt", "conversations")
    column = config.pop("conversation_column", field)
    columns = {"columns": {field: column}} if column != field else {}
    return config.pop("source", source), {"format": form, **columns}, False


def _instruct(config: dict[str, Any]) -> tuple[str, dict[str, Any], bool]:
    columns = config.pop("column_map", None) or {"input": "input", "output": "output"}
    renamed = {
        "instruction": columns.get("input", "input"),
        "output": columns.get("output", "output"),
        "input": "no_input",
    }
    return config.pop("source", ""), {"format": "alpaca", "columns": renamed}, False


def _preference(config: dict[str, Any]) -> tuple[str, dict[str, Any], bool]:
    columns = config.pop("column_map", None) or {}
    renamed = {side: columns.get(side, f"{side}_conversations") for side in ("chosen", "rejected")}
    return config.pop("source", ""), {"format": "preference", "columns": {"prompt": "no_prompt", **renamed}}, False


def _text(config: dict[str, Any], source: str = "", column: str = "text") -> tuple[str, dict[str, Any], bool]:
    column = config.pop("column", column)
    columns = {"columns": {"text": column}} if column != "text" else {}
    return config.pop("source", source), {"format": "text", **columns}, True


DATASETS = {
    "alpaca_dataset": lambda config: _alpaca(config, "tatsu-lab/alpaca"),
    "alpaca_cleaned_dataset": lambda config: _alpaca(config, "yahma/alpaca-cleaned"),
    "chat_dataset": _chat,
    "slimorca_dataset": lambda config: _chat(config, "Open-Orca/SlimOrca-Dedup", "sharegpt"),
    "instruct_dataset": _instruct,
    "preference_dataset": _preference,
    "text_completion_dataset": _text,
    "wikitext_dataset": lambda config: _text(config, "EleutherAI/wikitext_document_level", "page"),
}
