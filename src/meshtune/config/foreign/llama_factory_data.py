"""LLaMA-Factory's data (v0): names of a registry, mixtures, lengths and packing."""

from __future__ import annotations

from meshtune.config.foreign.draft import Draft
from meshtune.config.foreign.streams import stops
from meshtune.config.foreign.templates import LLAMA_FACTORY, template

TOOLS_WRITTEN = (
    "that template must also write the tools and calls of the data: where it does not, set model.chat_template"
)


def sources(draft: Draft, kind: str) -> bool:
    """Translates the data of stage `kind`. Returns whether there are validation data."""
    names = draft.get("dataset")
    if not names:
        draft.refuse("dataset", "the file names no data set", "add dataset")
    _listed(draft, "data.train", "dataset", names or [])
    registry(draft)
    _mixing(draft, len(names or []))
    _lengths(draft, kind)
    if kind != "pt":
        chat_template(draft)
    if kind in ("sft", "pt"):
        for key, ours in (("train_on_prompt", "train_on_prompt"), ("mask_history", "last_turn_only")):
            if draft.get(key):
                draft.put(f"data.{ours}", True, key)
    if draft.get("default_system"):
        draft.put("data.system", draft.get("default_system"), "default_system")
    if draft.get("tool_format"):
        draft.differ("tool_format", "tools are written as the chat template writes them")
    if not draft.get("enable_thinking"):
        draft.differ("enable_thinking", "the template's own default: see data.reasoning, and compare what is trained")
    if draft.get("preserve_thinking"):
        draft.differ("preserve_thinking", "reasoning of earlier turns is kept as data.reasoning says")
    if draft.get("streaming"):
        _streamed(draft)
    elif draft.get("disable_shuffling"):
        draft.put("data.shuffle", False, "disable_shuffling")
    if draft.get("tokenized_path"):
        draft.differ(
            "tokenized_path", "training prepares its data and keeps them; LLaMA-Factory stops when they are written"
        )
    return _validation(draft)


def _streamed(draft: Draft) -> None:
    """What goes with a stream, and what does not."""
    draft.idle("disable_shuffling", "a stream is drawn from a buffer whatever it says")
    if draft.get("max_samples"):
        stops(draft, "max_samples", "leave it out")
    if 0 < (draft.get("val_size") or 0) < 1:
        stops(draft, "val_size", "give a whole number of records")
    if "data.registry" in draft.settings:
        draft.remark("A stream there does not read num_samples of dataset_info.json, which counts here.")


def _listed(draft: Draft, to: str, key: str, names: list[str]) -> None:
    hub = draft.get("dataset_dir") == "ONLINE"
    for number, name in enumerate(names):
        draft.put(f"{to}.{number}.{'path' if hub else 'name'}", name, key)
        if draft.get("max_samples"):
            draft.put(f"{to}.{number}.cap", draft.get("max_samples"), "max_samples")


def registry(draft: Draft) -> None:
    folder = draft.get("dataset_dir")
    if not isinstance(folder, str):
        draft.refuse("dataset_dir", "a registry is a file or the folder that holds it", "give its folder")
    elif folder.startswith("REMOTE:"):
        repository = folder.removeprefix("REMOTE:")
        draft.refuse(
            "dataset_dir",
            f"the registry lies in the hub's {repository}, and registries are read from disk",
            f"download it: hf download {repository} --repo-type dataset --local-dir data, and set dataset_dir: data",
        )
    elif folder == "ONLINE":
        draft.idle("dataset_dir", "data sets are named by their hub ids")
    else:
        draft.put("data.registry", folder, "dataset_dir", note="its dataset_info.json is read as it is")


def _mixing(draft: Draft, count: int) -> None:
    strategy = draft.get("mix_strategy")
    if strategy == "interleave_once":
        ordered = bool(draft.get("streaming") or draft.get("disable_shuffling"))
        note = "each record once an epoch, shuffled over all sources"
        note += "; there the shares decide the order" if ordered else ", whatever the shares"
        keys = ("mix_strategy", "interleave_probs")
        draft.put("data.mixing", "concat", *keys, note=note, differs=ordered)
        return
    if strategy not in ("concat", "interleave_under", "interleave_over"):
        draft.refuse("mix_strategy", f"there is no mixture {strategy} here", "use concat or interleave_under")
        return
    draft.put("data.mixing", strategy, "mix_strategy")
    shares = draft.get("interleave_probs")
    if strategy != "concat" and shares:
        if len(shares) != count:
            draft.refuse("interleave_probs", f"{len(shares)} shares for {count} data sets", "give one a data set")
            return
        for number, share in enumerate(shares):
            draft.put(f"data.train.{number}.weight", float(share), "interleave_probs")


def _lengths(draft: Draft, kind: str) -> None:
    note = "documents go on in the next row" if kind == "pt" else ""
    draft.put("data.max_length", draft.get("cutoff_len"), "cutoff_len", note=note)
    if kind != "pt":
        draft.put("data.train_on_tail", True, "template", note="the line break after a turn's end is trained on")
        draft.put("data.overlong", "turns", "cutoff_len", note="prompt and answer of a turn are cut in proportion")
    packing = draft.get("packing")
    packing = kind == "pt" if packing is None else packing
    if draft.get("neat_packing"):
        draft.put("data.packing", True, "neat_packing", "packing")
    elif packing and kind == "pt":
        note = "documents do not see each other in a row; LLaMA-Factory joins all text and cuts it into rows"
        draft.put("data.packing", True, "packing", note=note, differs=True)
    elif packing:
        note = "documents do not see each other in a row; in LLaMA-Factory they do, without neat_packing"
        draft.put("data.packing", True, "packing", note=note, differs=True)
    else:
        draft.put("data.packing", False, "packing", note="one document a row, so that a batch holds as many")


def chat_template(draft: Draft) -> None:
    name = draft.get("template")
    if name is None:
        draft.remark("no template is named: the tokenizer's own is used, as by LLaMA-Factory")
        return
    entry = template(draft, "template", name, LLAMA_FACTORY)
    if entry is None:
        draft.differ("template", TOOLS_WRITTEN)
    if entry and entry.system and not draft.get("default_system"):
        draft.put("data.system", entry.system, "template", note="the template's own")


def _validation(draft: Draft) -> bool:
    names, share = draft.get("eval_dataset"), draft.get("val_size")
    if names:
        _listed(draft, "data.validation", "eval_dataset", names)
        return True
    if share and share > 0:
        draft.put("data.validation", share if share < 1 else int(share), "val_size")
        return True
    return False
