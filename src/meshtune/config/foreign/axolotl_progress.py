"""What an axolotl file says of evaluating, saving and logging."""

from __future__ import annotations

from meshtune.config.foreign.draft import Draft
from meshtune.config.foreign.trainer import trackers, upload


def evaluation(draft: Draft, validation: bool) -> None:
    """When validation data are evaluated."""
    if not validation:
        return
    strategy = draft.given.get("eval_strategy", draft.given.get("evaluation_strategy"))
    steps, times = draft.get("eval_steps"), draft.get("evals_per_epoch")
    if steps is not None and steps >= 1:
        draft.put("eval.every", int(steps), "eval_steps")
    elif times or steps or strategy == "epoch":
        key = "evals_per_epoch" if times else "eval_steps" if steps else "eval_strategy"
        note = "" if times == 1 or strategy == "epoch" else "once an epoch: steps of an epoch are not known before data"
        draft.put("eval.every", "epoch", key, note=note, differs=bool(note))
    else:
        draft.put("eval.every", None, "evals_per_epoch", "eval_strategy", note="evaluated at the end alone")
    if draft.settings["eval.every"].value is not None:
        draft.put("eval.at_start", True, note="axolotl evaluates before the first step")
    if draft.get("early_stopping_patience"):
        draft.put("eval.early_stopping", draft.get("early_stopping_patience"), "early_stopping_patience")


def _loads_best(draft: Draft) -> bool:
    """Whether the result is the best checkpoint: by default too, where each is saved with an evaluation."""
    asked_for = draft.given.get("load_best_model_at_end", True) or draft.get("early_stopping_patience")
    held_out = bool(draft.get("val_set_size")) != bool(draft.get("test_datasets"))
    if not asked_for or not held_out or draft.get("rl") is not None or draft.get("reward_model"):
        return False
    saved, evaluated = (
        _interval(draft, *keys) for keys in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch"))
    )
    return bool(saved and evaluated and saved % evaluated == 0)


def _interval(draft: Draft, steps: str, times: str) -> float | None:
    """Steps, or the share of the run, between two saves or evaluations."""
    if draft.get(times) and draft.get("num_epochs"):
        share = 1.0 / (draft.get(times) * draft.get("num_epochs"))
        return share if share < 1 else None
    return draft.get(steps)


def saving(draft: Draft) -> None:
    """Checkpoints, resuming and the upload of the result."""
    if (steps := draft.get("save_steps")) and steps >= 1:
        draft.put("checkpoint.every", int(steps), "save_steps")
    else:
        draft.idle("save_steps", "checkpoints are about ten a run; results are the same")
    best = _loads_best(draft)
    draft.put("checkpoint.keep_best", best, "load_best_model_at_end")
    if best:
        draft.put("checkpoint.result", "best", "load_best_model_at_end", note="the best of all evaluations")
    if draft.get("hub_model_id"):
        upload(draft)
    if draft.get("auto_resume_from_checkpoints"):
        draft.put("resume", True, "auto_resume_from_checkpoints", note="from a checkpoint of Meshtune's in output")


def logging(draft: Draft) -> None:
    """How often a step is logged, and the trackers."""
    draft.put("log.every", max(1, draft.get("logging_steps") or 1), "logging_steps")
    for name in ("wandb", "mlflow", "trackio", "tensorboard"):
        project = {"wandb": "wandb_project", "mlflow": "mlflow_experiment_name", "trackio": "trackio_project_name"}.get(
            name
        )
        enabled = draft.get(f"use_{name}") if f"use_{name}" in draft.given else project and draft.get(project)
        if enabled:
            key = f"use_{name}" if f"use_{name}" in draft.given else str(project)
            known = draft.settings["log.trackers"].value if "log.trackers" in draft.settings else []
            trackers(draft, key, [*known, name])
            if project and draft.get(project):
                draft.put("log.project", draft.get(project), project)
    for name in ("use_comet", "use_swanlab"):
        if draft.get(name):
            draft.differ(name, "there is no such tracker here; metrics.jsonl has every number")
