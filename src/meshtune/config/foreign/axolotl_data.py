"""axolotl's data sets: the translation of each type of prompt."""

from __future__ import annotations

import os
from typing import Any

from meshtune.config.foreign.draft import Draft, UnfitValueError, entries, text
from meshtune.config.foreign.trainer import AXOLOTL, TOKENIZERS_OWN, stops, stream, template

# Keys of a data set that a type of prompt reads here, and those that change nothing here.
READ = frozenset(
    """path name split data_files type revision field field_messages field_chosen field_rejected field_instruction
    field_input field_output field_tools message_property_mappings message_field_role message_field_content roles
    roles_to_train train_on_eos drop_system_message chat_template text_column ds_type train_on_eot""".split()
)
IDLE = frozenset("""trust_remote_code preprocess_shards logprobs_field temperature""".split())
ROLES = {"user": "user_tag", "assistant": "assistant_tag", "system": "system_tag", "tool": "observation_tag"}
# The speakers that axolotl understands where `roles` is left out.
SPEAKERS = {"user": ("human", "user"), "assistant": ("gpt", "assistant"), "system": ("system",), "tool": ("tool",)}
ONE_TEMPLATE = "use one chat_template for all, or train on them one after another"
WRITTEN = "written out"  # the name of a type that is a mapping
NO_PROMPT = "no_prompt"  # a column that records do not have: both answers are whole conversations


ENDINGS = {
    "json": (".json", ".jsonl"),
    "csv": (".csv",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "text": (".txt",),
}

NO_INPUT = "no_input"  # a column that records do not have
PAIRED = "Below is an instruction that describes a task, paired with an input that provides further context. "
ALONE = "Below is an instruction that describes a task. "
WRITE = "Write a response that appropriately completes the request."
CONCISE = (
    "Below is an instruction from a USER that describes a task, paired with an input that provides further context. "
    "The ASSISTANT writes a response that concisely and appropriately completes the request.\n\n",
    "Below is an instruction from a USER that describes a task. The ASSISTANT writes a response that appropriately and "
    "concisely completes the request.\n\n",
)
CHAT = ("SYSTEM: {}\nUSER: {{instruction}}\n{{input}}\nASSISTANT:", "SYSTEM: {}\nUSER: {{instruction}}\nASSISTANT:")
PHI = (
    "<|system|>\n{}<|end|>\n<|user|>\n{{instruction}}<|end|>{{input}}<|assistant|>",
    "<|system|>\n{}<|end|>\n<|user|>\n{{instruction}}<|end|>\n<|assistant|>\n",
)
CHATML = (
    "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{{instruction}}\n{{input}}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{{instruction}}<|im_end|>\n<|im_start|>assistant\n",
)


def _tags(forms: tuple[str, str], systems: tuple[str, str]) -> dict[str, str]:
    return dict(zip(("prompt", "prompt_without_input"), map(str.format, forms, systems), strict=True))


USUAL = (PAIRED + WRITE, ALONE + WRITE)
# Types whose prompts are texts of their own: (columns, tags) of the format stanford_alpaca.
LITERAL: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "alpaca:chat": ({}, _tags(CHAT, USUAL)),
    "alpaca:phi": ({}, _tags(PHI, USUAL)),
    "alpaca:chatml": ({}, _tags(CHATML, USUAL)),
    "alpaca_chat.load_qa": ({"instruction": "question", "output": "answer", "input": NO_INPUT}, _tags(CHAT, CONCISE)),
    "alpaca_chat.load_concise": ({}, _tags(CHAT, CONCISE)),
}
WRITTEN_KEYS = {
    "system_prompt", "field_system", "field_instruction", "field_input", "field_output", "format", "no_input_format",
    "system_format",
}  # fmt: skip

PACKED = "an update has as many rows of sequence_len tokens as the batch; axolotl fills its rows in another order"


class RefusedError(Exception):
    """Why a data set cannot be read as axolotl reads it, and what to do."""

    def __init__(self, why: str, fix: str):
        super().__init__(why)
        self.why, self.fix = why, fix


class Entry(dict[str, Any]):
    """A data set of a file, which remembers in `read` the keys that were looked at."""

    def __init__(self, values: dict[str, Any]):
        super().__init__({name: value for name, value in values.items() if value not in (None, False)})
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def sources(draft: Draft, key: str, to: str, kind: str) -> list[tuple[str, str | None]]:
    """Translates the data sets of `key` to the list `to` for our stage `kind`. Returns the type of each, and the chat
    template that it names."""
    value = draft.get(key)
    listed = [value] if isinstance(value, dict | str) else value or []
    if key == "pretraining_dataset" and len(listed) > 1:
        draft.differ(key, f"{draft.tool} reads the first of its {len(listed)} data sets alone, and so is it here")
        listed = listed[:1]
    types: list[tuple[str, str | None]] = []
    for number, entry in enumerate(listed):
        entry = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict):
            draft.refuse(key, f"entry {number} is not a mapping", "give path and type")
            continue
        present = Entry(entry)
        try:
            prompts = _source(draft, key, f"{to}.{number}", present, kind)
            named = present.get("chat_template") if "chat_template" in prompts else None
            types.append((prompts, None if named is None else text(named)))
        except RefusedError as problem:
            draft.refuse(key, f"{present.get('path')}: {problem.why}", problem.fix)
        except UnfitValueError as problem:
            draft.refuse(key, f"{present.get('path')}: {problem}", "correct that data set")
        else:
            if "ds_type" in present:
                draft.mention(key, f"ds_type: {present['ds_type']}: files are read by their ending")
            if unread := [name for name in present if name not in present.read]:
                draft.mention(key, f"without an effect with this type: {', '.join(unread)}")
    return types


def _source(draft: Draft, key: str, to: str, entry: Entry, kind: str) -> str:
    unknown = [name for name in entry if name not in READ | IDLE]
    if unknown:
        _unread(entry, unknown)
    path = _path(entry)
    draft.put(f"{to}.path", path, key)
    stored, suffix = entry.get("ds_type"), os.path.splitext(path)[1]
    if stored in ENDINGS and os.path.isfile(path) and suffix not in ENDINGS[stored]:
        raise RefusedError(
            f"ds_type: {stored}: files are read by their ending here", f"name it {path}{ENDINGS[stored][0]}"
        )
    for theirs, ours in (("name", "subset"), ("split", "split"), ("revision", "revision")):
        if theirs in entry:
            draft.put(f"{to}.{ours}", text(entry[theirs]), key)
    prompts = entry.get("type", "pretrain" if kind == "pt" else "")
    if isinstance(prompts, dict) and kind == "sft":
        written_out(draft, key, to, prompts)
        return WRITTEN
    if not isinstance(prompts, str):
        raise RefusedError("a prompt written out in type is for supervised tuning alone", "name a type")
    form, columns, tags = _form(draft, key, prompts, entry, kind)
    named = (
        f", chat_template: {entry['chat_template']}" if "chat_template" in prompts and "chat_template" in entry else ""
    )
    draft.put(f"{to}.format", form, key, note=f"type: {prompts}{named}")
    if columns:
        draft.put(f"{to}.columns", columns, key)
    if tags and prompts in LITERAL:
        draft.put(f"{to}.tags", tags, key, note="axolotl's own words")
    elif tags:
        draft.put(f"{to}.tags", tags, key)
    return prompts


def _unread(entry: Entry, unknown: list[str]) -> None:
    field = entry.get("field_thinking", "reasoning_content")
    key = entry.get("template_thinking_key", "reasoning_content")
    if field == key:  # fields of a message go to the template as they are
        unknown = [name for name in unknown if name not in ("field_thinking", "template_thinking_key")]
    elif {"field_thinking", "template_thinking_key"} & set(unknown):
        raise RefusedError(
            f"reasoning lies in '{field}' of a message, and the template reads '{key}'", f"rename it to {key}"
        )
    if not unknown:
        return
    if "shards" in unknown:
        raise RefusedError("a source is used whole, or its first records", "leave shards out; cap takes the first")
    raise RefusedError(f"{', '.join(unknown)}: nothing here does that", f"leave out {', '.join(unknown)}")


def _path(entry: Entry) -> str:
    path, files = text(entry.get("path", "")), entry.get("data_files")
    if not path:
        raise RefusedError("the data set has no path", "add its path")
    if files is None:
        return path
    chosen = [text(file) for file in (files if isinstance(files, list) else [files])]
    local = [
        file if path in ("json", "jsonl", "csv", "parquet", "text") else os.path.join(path, file) for file in chosen
    ]
    if len(local) == 1 and (path in ("json", "jsonl", "csv", "parquet", "text") or os.path.exists(local[0])):
        return local[0]
    raise RefusedError(
        f"single files ({', '.join(chosen)}) of a hub data set are not picked out",
        f"download them: hf download {path} {chosen[0]} --repo-type dataset --local-dir data, and give the file",
    )


def _form(draft: Draft, key: str, prompts: str, entry: Entry, kind: str) -> tuple[str, Any, Any]:
    """(format, columns, tags) of a type of prompt."""
    if kind == "sft":
        return _documents(draft, key, prompts, entry)
    if kind == "pt" and prompts in ("completion", "pretrain"):
        column = entry.get("field", entry.get("text_column", "text"))
        return "text", {"text": text(column)} if column != "text" else {}, {}
    if kind == "kto" and prompts.endswith((".ultra", ".argilla")):
        _answers_template(draft, key, prompts)
        return "alpaca", {"instruction": "prompt", "output": "completion", "label": "label"}, {}
    if kind == "rm" and prompts == "bradley_terry.chat_template":
        return "alpaca", {"instruction": "input"}, {}
    if kind == "grpo" and not prompts:
        return "prompt", {}, {}
    if kind == "grpo":
        raise RefusedError(
            f"'{prompts}' is a function that makes prompts, and code of recipes is not run",
            "save its records as JSON lines with the field prompt, and write them into the recipe's data.train",
        )
    if kind in ("dpo", "orpo", "simpo", "cpo", "ipo"):
        return _pairs(draft, key, prompts, entry)
    raise RefusedError(f"the prompts of type '{prompts}' are not written here", "write records as messages or texts")


def _documents(draft: Draft, key: str, prompts: str, entry: Entry) -> tuple[str, Any, Any]:
    if prompts == "alpaca":
        renamed = {"instruction": "field_instruction", "input": "field_input", "output": "field_output"}
        return "stanford_alpaca", {ours: entry[theirs] for ours, theirs in renamed.items() if theirs in entry}, {}
    if prompts in LITERAL:
        return "stanford_alpaca", *LITERAL[prompts]
    if prompts == "completion":
        raise RefusedError("plain text beside conversations is another stage here", "train on it alone first: stage pt")
    if prompts != "chat_template":
        if not prompts:
            raise RefusedError("without a type it holds tokens, which are not read", "give texts or messages")
        where = "its code is in a Python file" if "." in prompts or "_" in prompts else "it has words of its own"
        raise RefusedError(
            f"the prompts of type '{prompts}' are not written here: {where}",
            "write records as messages and use type: chat_template",
        )
    if entry.get("drop_system_message"):
        raise RefusedError("system prompts of records are kept", "remove them from the data")
    if entry.get("roles_to_train", ["assistant"]) not in (
        ["assistant"],
        ["gpt"],
        ["gpt", "assistant"],
        ["assistant", "gpt"],
    ):
        raise RefusedError("assistant turns are what is learned", "leave roles_to_train out, or use train_on_inputs")
    if entry.get("train_on_eot", "turn") not in ("turn", "all") or entry.get("train_on_eos", "turn") not in (
        "turn",
        "all",
    ):
        raise RefusedError("the end of every learned turn is learned", "use train_on_eos: turn")
    return _turns(entry)


def _turns(entry: Entry) -> tuple[str, Any, Any]:
    """A list of turns: messages where they are OpenAI's, else sharegpt with the names of keys and speakers."""
    mapped = dict(_mapping(entry, "message_property_mappings"))
    role = mapped.pop("role", entry.get("message_field_role", "role"))
    content = mapped.pop("content", entry.get("message_field_content", "content"))
    unread = [name for name in mapped if name not in ("tool_calls", "tool_call_id", "name")]
    if unread:
        raise RefusedError(f"messages with {', '.join(unread)} of other names are not read", "rename them in the data")
    field = entry.get("field_messages", "messages")
    speakers = _speakers(_mapping(entry, "roles"))
    tools = {"tools": entry["field_tools"]} if entry.get("field_tools", "tools") != "tools" else {}
    if (role, content) == ("role", "content") and not speakers:
        return "messages", ({"messages": field} if field != "messages" else {}) | tools, {}
    tags = {"role_tag": role, "content_tag": content, **speakers}
    return "sharegpt", ({"conversations": field} if field != "conversations" else {}) | tools, tags


def _mapping(entry: Entry, name: str) -> dict[str, Any]:
    value = entry.get(name) or {}
    if not isinstance(value, dict):
        raise UnfitValueError(f"{name} must be a mapping of keys to values")
    return value


def _speakers(roles: dict[str, Any]) -> dict[str, str]:
    """Names of speakers that axolotl's own do not have."""
    renamed: dict[str, str] = {}
    for role, spoken in roles.items():
        unnamed = [name for name in entries(spoken) if name not in SPEAKERS.get(role, ())]
        if role not in ROLES or len(unnamed) > 1:
            raise RefusedError(f"the role {role} has names {spoken}", "give one name a role in the data")
        if unnamed:
            renamed[ROLES[role]] = text(unnamed[0])
    return renamed


def _pairs(draft: Draft, key: str, prompts: str, entry: Entry) -> tuple[str, Any, Any]:
    if prompts in ("chat_template.default", "chat_template"):
        form, columns, tags = _turns(entry)
        answers = {side: entry[f"field_{side}"] for side in ("chosen", "rejected") if f"field_{side}" in entry}
        return form, columns | {side: name for side, name in answers.items() if name != side}, tags
    if prompts.endswith((".ultra", ".argilla")) or prompts in ("chatml.argilla_chat", "chat_template.argilla_chat"):
        _answers_template(draft, key, prompts)
        return "preference", {"prompt": NO_PROMPT}, {}
    raise RefusedError(f"the prompts of type '{prompts}' are not written here", "write records as messages")


def _answers_template(draft: Draft, key: str, prompts: str) -> None:
    """The template that a type writes itself: `llama3.ultra` is Llama 3's whatever the model's is."""
    name = prompts.partition(".")[0]
    if name in ("llama3", "chatml"):
        draft.put("model.chat_template", name, key, note=f"type: {prompts}")


def chat_template(draft: Draft, types: list[tuple[str, str | None]]) -> None:
    """The template of conversations: that of the data sets, else of the file. axolotl's own by name are copies of the
    models', which are used here."""
    file_template, written = draft.get("chat_template"), draft.settings.get("model.chat_template")
    chosen = list(dict.fromkeys(named or file_template for prompts, named in types if "chat_template" in prompts))
    if written is not None and chosen:
        chosen = list(dict.fromkeys([written.value, *chosen]))
    if len(chosen) > 1:
        listed = " and ".join(name or "the tokenizer's own" for name in chosen)
        draft.refuse("datasets", f"data sets are rendered with {listed}, and a run has one chat template", ONE_TEMPLATE)
        return
    if not chosen or written is not None:
        return
    (name,) = chosen
    key = "chat_template" if name == file_template else "datasets"
    if name is None:
        return
    if name == "jinja" and key == "datasets":
        draft.refuse(
            key, "chat_template: jinja of a data set", "write chat_template and chat_template_jinja for the file"
        )
    elif name == "jinja":
        _jinja(draft)
    elif name.startswith("tokenizer_default_fallback_"):
        draft.differ(key, TOKENIZERS_OWN)
    else:
        template(draft, key, name, AXOLOTL)


def _jinja(draft: Draft) -> None:
    written = draft.get("chat_template_jinja")
    if written is None:
        draft.refuse("chat_template", "jinja needs chat_template_jinja", "add it")
    elif "{" in written:
        draft.files[".jinja"] = written
        draft.put("model.chat_template", ".jinja", "chat_template_jinja", "chat_template")
    else:
        draft.put("model.chat_template", written, "chat_template_jinja", "chat_template")


def written_out(draft: Draft, key: str, to: str, prompts: dict[str, Any]) -> None:
    """A prompt whose parts the file writes out."""
    values = {name: text(value) for name, value in prompts.items() if value is not None}
    unknown = set(values) - WRITTEN_KEYS
    if unknown:
        raise RefusedError(f"{', '.join(sorted(unknown))} of a prompt: nothing here does that", "leave it out")
    if values.get("field_system", "system") != "system":
        raise RefusedError("system prompts of records are not put in a written prompt", "write them into the records")
    system = values.get("system_prompt", "")
    system = values.get("system_format", "{system}").replace("{system}", system) if system else ""
    with_input = values.get("format", "{instruction} {input} ")
    tags = {
        "prompt": system + with_input,
        "prompt_without_input": system + values.get("no_input_format", "{instruction} "),
    }
    renamed = {
        field: values[f"field_{field}"] for field in ("instruction", "input", "output") if f"field_{field}" in values
    }
    note = "type: a prompt written out; a column system of the records would take the place of system_prompt there"
    draft.put(f"{to}.format", "stanford_alpaca", key, note=note, differs=True)
    if renamed:
        draft.put(f"{to}.columns", renamed, key)
    draft.put(f"{to}.tags", tags, key)


def data(draft: Draft, kind: str) -> bool:
    """Translates the data of stage `kind`. Returns whether there are validation data."""
    key = "pretraining_dataset" if draft.get("pretraining_dataset") is not None else "datasets"
    if draft.get(key) is None:
        draft.refuse("datasets", "the file names no data", "add datasets")
    types = sources(draft, key, "data.train", kind)
    types += sources(draft, "test_datasets", "data.validation", kind)
    chat_template(draft, types)
    strategy = {"drop": "drop", "truncate": "truncate", "raise": "error"}.get(
        draft.get("excess_length_strategy").lower()
    )
    if strategy is None:
        draft.refuse("excess_length_strategy", "it is not one of drop, truncate and raise", "use one of them")
    streamed = key == "pretraining_dataset"
    draft.put("data.overlong", "truncate" if streamed else strategy, "excess_length_strategy")
    packed = bool(draft.get("sample_packing")) or streamed
    draft.put("data.packing", packed, "sample_packing", note=PACKED if packed else "", differs=packed)
    for unequal in ("max_prompt_len", "eval_sequence_len"):
        if unequal in draft.given:
            draft.differ(unequal, "prompts, answers and validation records are cut by sequence_len alone")
    if draft.get("rl") is None:
        _order(draft, streamed or bool(draft.get("streaming")))
    share = draft.get("val_set_size")
    if share and not draft.get("test_datasets"):
        draft.put("data.validation", share if share < 1 else int(share), "val_set_size")
    noise = "neftune_noise_alpha" if "neftune_noise_alpha" in draft.given else "noisy_embedding_alpha"
    if kind == "sft" and draft.get(noise):
        draft.put("stage.neftune_alpha", draft.get(noise), noise)
    return bool(share or draft.get("test_datasets"))


def _order(draft: Draft, streamed: bool) -> None:
    """The order of the data: drawn at random, but for curriculum_sampling, or a stream's own."""
    merged, curriculum = draft.get("shuffle_merged_datasets"), draft.get("curriculum_sampling")
    several = len(draft.get("datasets") or []) > 1
    if several and draft.get("shuffle_before_merging_datasets") and not merged and (streamed or curriculum):
        draft.refuse(
            "shuffle_before_merging_datasets",
            "data sets are shuffled together here, or each is read in its order",
            "shuffle the files, or leave it out",
        )
    if streamed and not merged:
        draft.put("data.shuffle", False, "shuffle_merged_datasets")
    elif curriculum and not (streamed and draft.get("sample_packing")):
        note = "there they are shuffled once, and read in that order every epoch" if several and merged else ""
        draft.put(
            "data.shuffle", False, "curriculum_sampling", "shuffle_merged_datasets", note=note, differs=bool(note)
        )


def put_streaming(draft: Draft) -> None:
    """Translates data that are read while training."""
    key = "pretraining_dataset" if draft.get("pretraining_dataset") is not None else "streaming"
    if draft.get("rl") is not None or not draft.get(key):  # axolotl reads the data of rl before training
        return
    if draft.get("val_set_size"):
        stops(draft, "val_set_size", "give test_datasets")
    if key == "streaming" and draft.get("sample_packing") and len(draft.get("datasets") or []) > 1:
        stops(draft, "datasets", "give one data set, or turn sample_packing off")
    buffers = ("streaming_multipack_buffer_size", "pretrain_multipack_buffer_size")
    stream(draft, key, *(("streaming",) if draft.get("streaming") and key != "streaming" else ()), *buffers)
