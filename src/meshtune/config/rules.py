"""Which settings of different sections go together; each rule raises ValueError with the nearest choice that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshtune.config.rewards import ModelReward
from meshtune.config.sections import LOW_RANK
from meshtune.errors import UserError
from meshtune.objectives.config import ONLINE_STAGES, PAIR_STAGES, DistillConfig

if TYPE_CHECKING:
    from meshtune.config.recipe import Recipe
    from meshtune.config.sections import RolloutSection


def check_together(recipe: Recipe) -> None:
    """Raises ValueError for the first rule between sections that `recipe` breaks."""
    if recipe.resume and recipe.overwrite:
        raise ValueError("give resume or overwrite, not both")
    _check_evaluation(recipe)
    _check_base(recipe)
    _check_adapter(recipe)
    _check_optimizer(recipe)
    if recipe.optimizer.layerwise:
        _check_layerwise(recipe)
    _check_answers(recipe)
    _check_distillation(recipe)
    if recipe.vision is not None:
        _check_pictures(recipe)
    _check_online(recipe)


def _check_pictures(recipe: Recipe) -> None:
    """Rules for recipes that read pictures."""
    stage = recipe.stage.kind
    if stage in ("rm", "pt"):
        raise ValueError(
            f"vision is not possible with stage {stage}, which reads text only: pictures are read in sft, distill, the "
            "preference stages (dpo, kto, orpo, simpo) and the online ones; leave vision out to train on text"
        )
    if recipe.rollout is not None and recipe.rollout.environment is not None:
        raise ValueError("vision is not possible with rollout.environment, whose turns are text: leave one of them out")
    if any(isinstance(reward, ModelReward) for reward in recipe.rewards):
        raise ValueError(
            "vision is not possible with a reward model, which reads text only: score with a function, which gets the "
            "files of the pictures as images, or with a server (rewards: {url: ...})"
        )
    if recipe.teacher is not None and recipe.teacher.is_server:
        raise ValueError(
            "vision is not possible with a teacher behind an address, which is asked about tokens: give the teacher's "
            "folder or hub id"
        )
    if recipe.mesh != "auto" and recipe.mesh.cp != 1:
        raise ValueError("vision is not possible with mesh.cp: a picture is on one device; use dp, fsdp or tp")
    if recipe.vision and recipe.vision.freeze_language and recipe.optimizer.layerwise:
        raise ValueError(
            "an update in the backward pass goes through the layers of the language model, which "
            "vision.freeze_language freezes: leave optimizer.in_backward (or badam) or vision.freeze_language out"
        )
    if recipe.method.kind == "llama_pro":
        raise ValueError("vision is not possible with method llama_pro: use lora, full or freeze")


def _check_evaluation(recipe: Recipe) -> None:
    if recipe.data.validation is None:
        needs_validation = {
            "eval.early_stopping": recipe.eval.early_stopping is not None,
            "eval.at_start": recipe.eval.at_start,
            "eval.every": isinstance(recipe.eval.every, int),
        }
        for key, is_set in needs_validation.items():
            if is_set:
                raise ValueError(f"{key} needs validation data: give data.validation, or leave {key} out")
    if recipe.eval.early_stopping is not None and recipe.eval.every is None:
        raise ValueError("eval.early_stopping needs eval.every: with null nothing is evaluated")
    if recipe.checkpoint.result == "best":
        if recipe.data.validation is None or recipe.eval.every is None:
            raise ValueError(
                "checkpoint.result: best needs data.validation and eval.every: without them nothing is best"
            )
        if not recipe.checkpoint.keep_best:
            raise ValueError("checkpoint.result: best needs checkpoint.keep_best: true, which keeps that state")
    if recipe.checkpoint.mtbf is not None and recipe.checkpoint.every != "auto":
        raise ValueError("checkpoint.mtbf is for checkpoint.every: auto: set that, or leave mtbf out")
    if recipe.sample.every is not None and not recipe.sample.prompts:
        raise ValueError("sample.every needs sample.prompts: there is nothing to continue")
    if recipe.vision is None and not all(isinstance(prompt, str) for prompt in recipe.sample.prompts):
        raise ValueError("sample.prompts of parts are for models that see: set vision={}, or write the prompts as text")


def _check_base(recipe: Recipe) -> None:
    method = recipe.method.kind
    if _quantises(recipe) and method not in ("lora", "llama_pro"):
        raise ValueError(
            f"quantize freezes the base in codes that no update can change, and method {method} trains the base "
            "itself: use method: lora or llama_pro with quantize, or leave quantize out"
        )
    if recipe.model.adapter is not None and method != "lora":
        raise ValueError(
            f"model.adapter continues training an adapter, and method {method} trains none: use method: lora, or "
            "model.merge_adapters, which merges it into the base first"
        )


def _quantises(recipe: Recipe) -> bool:
    return recipe.quantize is not None and recipe.quantize.quantises


def _check_adapter(recipe: Recipe) -> None:
    adapter = getattr(recipe.method, "adapter", None)
    if adapter == "pissa" and _quantises(recipe):
        raise ValueError(
            "method.adapter: pissa decomposes the base's weights, and quantising has already changed them: use "
            "method.adapter: loftq with quantize, or leave quantize out"
        )
    if adapter == "loftq" and not _quantises(recipe):
        raise ValueError(
            "method.adapter: loftq starts from the error of quantising the base: add quantize: nf4 (or int8, int4, "
            "fp8), or use method.adapter: pissa"
        )


def _check_optimizer(recipe: Recipe) -> None:
    optimizer, method = recipe.optimizer, recipe.method.kind
    if optimizer.name in LOW_RANK and method == "lora":
        raise ValueError(
            f"optimizer.name: {optimizer.name} projects the gradients of whole matrices to a low rank, and those of "
            "adapters have a low rank already: use method: full or freeze with it, or optimizer.name: adamw with lora"
        )
    if optimizer.name == "sophia" and recipe.stage.kind not in ("sft", "pt"):
        raise ValueError(
            "optimizer.name: sophia estimates curvature from the model's predictions of single tokens, and stage "
            f"{recipe.stage.kind} scores whole answers: use adamw with it, or sophia with sft or pt"
        )
    if optimizer.lora_plus_ratio is not None and method != "lora":
        raise ValueError(
            f"optimizer.lora_plus_ratio sets the rates of an adapter's A and B, and method {method} has no adapters: "
            "use method: lora, or leave it out"
        )
    for name in ("projector_learning_rate", "tower_learning_rate"):
        if name in optimizer.own_rates and recipe.vision is None:
            raise ValueError(
                f"optimizer.{name} is for a part of a model that sees, and the recipe has no section vision: add "
                f"vision: {{train: [{name.split('_')[0]}]}}, or leave it out"
            )
    if optimizer.stochastic_rounding and (recipe.compute.precision != "bfloat16" or optimizer.name == "badam"):
        raise ValueError(
            "optimizer.stochastic_rounding rounds weights that are trained in bfloat16, and "
            + (
                "badam has a float32 copy of the layer that it trains: leave it out"
                if optimizer.name == "badam"
                else f"compute.precision is {recipe.compute.precision}, whose trained weights are float32 (auto too): "
                "leave it out, or set compute.precision: bfloat16"
            )
        )
    if "weights" in recipe.compute.offload and method == "full" and not optimizer.in_backward:
        raise ValueError(
            "compute.offload: [weights] has no frozen weights to offload: method full trains them all, and trained "
            "weights can stay in the host's memory only where each layer is updated in the backward pass: set "
            "optimizer.in_backward: true and max_grad_norm: null (see docs/memory.md), or leave weights out"
        )


def _check_layerwise(recipe: Recipe) -> None:
    """Rules for optimizers that make the backward pass go layer by layer."""
    optimizer, compute = recipe.optimizer, recipe.compute
    chosen = "optimizer.in_backward" if optimizer.in_backward else f"optimizer.name: {optimizer.name}"
    if "weights" in compute.offload and optimizer.name == "schedule_free":
        raise ValueError(
            "schedule_free evaluates and exports an average of all weights, which would all be on the device at "
            "once: use another optimizer with compute.offload: [weights], or leave weights out"
        )
    if recipe.method.kind == "lora":
        raise ValueError(
            f"{chosen} saves the gradients and optimizer state of whole layers, and adapters have little of either: "
            "use method: full or freeze with it, or leave it out"
        )
    if optimizer.in_backward and (recipe.train.micro_batch == "auto" or recipe.train.accumulation > 1):
        raise ValueError(
            "optimizer.in_backward frees the gradient of a micro-batch before the next one's could be added to it: "
            f"leave train.micro_batch out (all {recipe.train.batch_size} rows at once) or lower train.batch_size; "
            "adamw8bit, galore or badam without in_backward accumulate over micro-batches"
        )
    if compute.remat not in ("auto", "full"):
        raise ValueError(
            f"{chosen} recomputes each layer in the backward pass from the layer's input: use compute.remat: full or "
            f"auto, not {compute.remat}"
        )
    if optimizer.name == "badam" and "optimizer" in compute.offload:
        raise ValueError("badam has optimizer state for one layer only: leave optimizer out of compute.offload")
    if not compute.scan_layers:
        raise ValueError(f"{chosen} scans over the layers: leave compute.scan_layers out")


def _check_answers(recipe: Recipe) -> None:
    """Rules for stages that score answers instead of tokens."""
    stage = recipe.stage
    if stage.kind == "rm" and recipe.sample.prompts:
        raise ValueError("sample.prompts cannot be used with stage rm: a reward model gives scores and writes no text")
    if recipe.data.train_on_prompt and (stage.kind in ("rm", "kto") or getattr(stage, "sft_weight", 1.0) == 0):
        raise ValueError(
            f"data.train_on_prompt cannot be used with stage {stage.kind} without sft_weight: only answers are compared"
        )


def _check_distillation(recipe: Recipe) -> None:
    if not isinstance(recipe.stage, DistillConfig):
        if recipe.teacher is not None:
            raise ValueError(f"teacher is read by stage distill only, and stage is {recipe.stage.kind}: remove it")
        return
    if recipe.teacher is None:
        raise ValueError("stage distill needs a teacher: give its model, such as teacher: Qwen/Qwen3-8B")
    if recipe.rewards:
        raise ValueError("stage distill has no rewards, the teacher's predictions are what it learns: remove rewards")
    example = "rollout, such as {prompts: 16, samples: 1, max_tokens: 256}"
    if recipe.teacher.is_server and recipe.stage.temperature != 1:
        raise ValueError(
            f"a server gives probabilities at temperature 1, and stage.temperature is {recipe.stage.temperature:g}: "
            "leave it out, or give the teacher's folder or hub id"
        )
    if recipe.rollout is None and recipe.stage.on_policy:
        raise ValueError(
            f"stage.on_policy {recipe.stage.on_policy:g} trains on completions that the student generates: give "
            f"{example}"
        )
    if recipe.rollout is None and recipe.teacher.is_server:
        raise ValueError(
            "a teacher behind an address is asked for some completions at a time, also those of the data: give "
            f"{example}"
        )


def require_online(recipe: Recipe, problem: str) -> None:
    """Raises UserError for a stage that does not generate what it trains on."""
    if recipe.stage.kind not in ONLINE_STAGES:
        fix = f"set stage to one of {', '.join(sorted(ONLINE_STAGES))}, with rollout and rewards"
        raise UserError(f"stage {recipe.stage.kind} {problem}", where="stage", fix=fix)


def _check_online(recipe: Recipe) -> None:
    """Rules for stages that train on completions of their own."""
    stage, rollout, online = recipe.stage.kind, recipe.rollout, recipe.stage.kind in ONLINE_STAGES
    if not online:
        generates = recipe.teacher is not None and (
            getattr(recipe.stage, "on_policy", 0) > 0 or recipe.teacher.is_server
        )
        if rollout is not None and generates:
            _check_rollout(recipe, rollout)
        for section, given in (
            ("rollout", rollout is not None and not generates),
            ("rewards", bool(recipe.rewards)),
        ):
            if given:
                raise ValueError(
                    f"{section} is read by online stages only, such as grpo, and stage is {stage}: remove it"
                )
        return
    if rollout is None:
        raise ValueError(
            f"stage {stage} trains on completions that it generates: give rollout, such as {{max_tokens: 256}}"
        )
    if not recipe.rewards and rollout.environment is None:
        raise ValueError(f"stage {stage} needs rewards: give a list, such as rewards: [reward.py:score]")
    correction = rollout.correction or "token"
    if getattr(recipe.stage, "loss", None) == "vespo" and not correction.startswith("token"):
        raise ValueError(
            f"loss vespo has the correction of every token in its ratio, and rollout.correction is {correction}: use "
            "token_truncate or token_mask"
        )
    if stage in PAIR_STAGES:
        if rollout.samples != 2:
            raise ValueError(
                f"stage {stage} compares two completions of every prompt, and rollout.samples is {rollout.samples}: "
                "set rollout.samples: 2"
            )
        if rollout.correction is not None:
            raise ValueError(
                f"rollout.correction has no meaning in stage {stage}, whose loss has no ratio: leave it out"
            )
    if stage == "ppo" and recipe.optimizer.layerwise:
        raise ValueError(
            "stage ppo trains a second model, the critic, in the same backward pass, and optimizer.in_backward and "
            "badam go through the layers of one: use another optimizer without in_backward"
        )
    count = rollout.prompts * rollout.samples
    count, horizon = rollout.prompts * rollout.samples, getattr(recipe.stage, "kl_horizon", 0.0)
    if getattr(recipe.stage, "kl_target", None) is not None and horizon <= 0.2 * count:
        raise ValueError(
            f"stage.kl_horizon {horizon:g} is too short for rollouts of {count} completions: the weight of the KL "
            f"divergence could fall to 0 after one. Give more than a fifth of them, such as {count}"
        )
    if rollout.samples < 2 and stage != "ppo":
        raise ValueError(f"rollout.samples: stage {stage} compares the completions of a prompt: give 2 or more")
    _check_rollout(recipe, rollout)


def _check_rollout(recipe: Recipe, rollout: RolloutSection) -> None:
    """Rules for the completions of a stage that generates some."""
    stage = recipe.stage.kind
    if rollout.environment is not None and stage in ("ppo", "distill"):
        raise ValueError(
            f"rollout.environment is not possible with stage {stage}, which would train on the results of tools too: "
            "use grpo or rloo, or leave it out"
        )
    if recipe.data.max_length <= rollout.max_tokens:
        raise ValueError(
            f"data.max_length {recipe.data.max_length} is the room of a prompt and its completion, and "
            f"rollout.max_tokens {rollout.max_tokens} leave none for the prompt: raise data.max_length"
        )
    if recipe.data.streaming:
        raise ValueError(f"data.streaming is not possible with stage {stage}: prompts are read before training")
    rows, unit = (rollout.completions // 2, "pairs") if stage in PAIR_STAGES else (rollout.completions, "completions")
    if recipe.train.batch_size != rows:
        raise ValueError(
            f"train.batch_size is given by rollout in stage {stage}: {rows} {unit} an update "
            f"(prompts{' * samples' * (unit == 'completions')} / updates). Leave it out"
        )
