"""The optimizers and schedules of transformers and axolotl by name, as ours."""

from __future__ import annotations

from meshtune.config.foreign.draft import Draft
from meshtune.config.foreign.rules import number
from meshtune.config.optimizer import READERS

EIGHT_BITS = "its state is in 8 bits in both, rounded by other code"
# Name -> (ours, what differs).
OPTIMIZERS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        "adamw adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_anyprecision adamw_torch_xla "
        "adamw_torch_npu_fused paged_adamw paged_adamw_32bit adamw_bnb_32bit".split(),
        ("adamw", ""),
    ),
    **dict.fromkeys("adamw_8bit adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit".split(), ("adamw8bit", EIGHT_BITS)),
    "adamw_torch_4bit": ("adamw8bit", "8 bits in place of 4: more memory, closer to AdamW"),
    "adafactor": ("adafactor", ""),
    "sgd": ("sgd", ""),
    **dict.fromkeys("lion_32bit lion paged_lion_32bit lion_pytorch".split(), ("lion", "")),
    **dict.fromkeys("lion_8bit paged_lion_8bit".split(), ("lion", "state of 32 bits in place of 8: closer to Lion")),
    **dict.fromkeys("galore_adamw galore_adamw_8bit galore_adafactor".split(), ("galore", "AdamW in the subspace")),
    "apollo_adamw": ("apollo", ""),
    "schedule_free_adamw": ("schedule_free", ""),
    "muon": ("muon", "matrices by Muon, all else by AdamW, scaled to the RMS of AdamW's updates"),
    "lomo": ("sgd", ""),
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "cosine_with_min_lr": "cosine",
}


def optimizer(draft: Draft) -> None:
    """The optimizer of `optim`, its schedule and moments. Methods that bring their own optimizer have set its name."""
    if "optimizer.name" not in draft.settings:
        named(draft, "optim")
    schedule(draft, "lr_scheduler_type")
    moments(draft, ("adam_beta1", "beta1"), ("adam_beta2", "beta2"), ("adam_epsilon", "eps"))
    clipping(draft, "max_grad_norm")


def named(draft: Draft, key: str) -> None:
    name = draft.get(key)
    if name not in OPTIMIZERS:
        known = ", ".join(dict.fromkeys(ours for ours, _ in OPTIMIZERS.values()))
        draft.refuse(key, f"there is no optimizer {name} here", f"choose one of: {known}")
        return
    ours, note = OPTIMIZERS[name]
    draft.put("optimizer.name", ours, key, note=note, differs=bool(note))
    if name == "lomo":
        draft.put("optimizer.in_backward", True, key)


def schedule(draft: Draft, key: str) -> None:
    """The schedule and its warm-up. transformers' `constant` has no warm-up, whatever is asked for."""
    name = str(draft.get(key))
    if _value(draft, "optimizer.name") == "schedule_free":
        draft.put("optimizer.schedule", "constant", key, note="schedule_free averages instead of decaying")
    elif name not in SCHEDULES:
        draft.refuse(key, f"there is no schedule {name} here", f"choose one of: {', '.join(SCHEDULES)}")
        return
    else:
        draft.put("optimizer.schedule", SCHEDULES[name], key)
    schedule_options(draft, name)
    if name == "constant":
        draft.put("optimizer.warmup_steps", 0, note="transformers' constant schedule has no warm-up")
    else:
        warmup(draft)


def schedule_options(draft: Draft, name: str) -> bool:
    """Translates lr_scheduler_kwargs of the schedule `name`. Returns whether all of them could be."""
    options = dict(draft.get("lr_scheduler_kwargs") or {}) if "lr_scheduler_kwargs" in draft.table else {}
    if name == "cosine_with_min_lr" and {"min_lr_rate", "min_lr"} & set(options):
        ratio = options.pop("min_lr_rate", None)
        least = options.pop("min_lr", None)
        ratio = number(least) / draft.get("learning_rate") if ratio is None else ratio
        draft.put("optimizer.min_lr_ratio", ratio, "lr_scheduler_kwargs")
    if options:
        draft.refuse("lr_scheduler_kwargs", f"{', '.join(options)}: the schedule has no such setting", "leave it out")
    return not options


def warmup(draft: Draft) -> None:
    steps, ratio = draft.get("warmup_steps") or 0, draft.get("warmup_ratio") or 0.0
    if steps >= 1:
        draft.put("optimizer.warmup_steps", int(steps), "warmup_steps")
    elif steps > 0:
        draft.put("optimizer.warmup_ratio", steps, "warmup_steps", note="below 1 it is a share of the steps")
    else:
        draft.put("optimizer.warmup_ratio", ratio, "warmup_ratio")


def moments(draft: Draft, *pairs: tuple[str, str]) -> None:
    name = _value(draft, "optimizer.name")
    for key, ours in pairs:
        if name in READERS[ours] and draft.get(key) is not None:
            draft.put(f"optimizer.{ours}", draft.get(key), key)


def clipping(draft: Draft, key: str) -> None:
    norm = draft.get(key)
    if _value(draft, "optimizer.in_backward"):
        draft.put("optimizer.max_grad_norm", None, note="updates in the backward pass are not clipped")
        draft.idle(key, "updates in the backward pass are not clipped")
    else:
        draft.put("optimizer.max_grad_norm", norm or None, key, note="" if norm else "0: never clipped")


def _value(draft: Draft, key: str) -> object:
    return draft.settings[key].value if key in draft.settings else None
