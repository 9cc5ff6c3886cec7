"""Resolves the model that a run starts from: the published one, or one with adapters merged, new tokens or new layers.
`materialize` writes it.

`materialize` writes it.
"""

from __future__ import annotations

import dataclasses
import pathlib

from meshtune.adapters.training_method import Method
from meshtune.config.recipe import Recipe
from meshtune.data.tokenizer import NewTokens, tokenizer_of
from meshtune.errors import UserError
from meshtune.families import scored_spec
from meshtune.families.balancing import with_aux_loss, with_bias_update_rate
from meshtune.families.composite import BOTH_WAYS, with_text_fields
from meshtune.families.expansion import expanded_config, group_layers
from meshtune.lazy import LazyFunction
from meshtune.model.spec import ModelSpec
from meshtune.objectives.stages import STAGES
from meshtune.runs.output import ADAPTER, check_result
from meshtune.runs.sources import is_run, split_state, state_result
from meshtune.weights.load import load_config, spec_of

resumed_config = LazyFunction("meshtune.adapters.continued:resumed_config")


@dataclasses.dataclass(frozen=True)
class Start:
    """The model that a run starts from.

    `config` and `spec` are of the model that is trained; `source` is its directory, or that of the model it is made
    from where `changed` is set. `tokens` are new ones, `blocks` the number of new layers.
    """

    source: pathlib.Path
    config: dict[str, object]
    spec: ModelSpec
    method: Method
    tokens: NewTokens = dataclasses.field(default_factory=NewTokens)
    blocks: int = 0
    changed: bool = False


def start_of(recipe: Recipe, source: pathlib.Path, dtype: str) -> Start:
    """Resolves the start of a recipe's run from only the config in `source` and the tokenizer; weights are `dtype`.

    Raises: UserError for tokens, layers or an adapter that the model cannot have.
    """
    section, method = recipe.model, recipe.method.resolved()
    config = load_config(source)
    tokens, blocks = NewTokens(), method.added_layers
    if section.new_tokens or section.new_special_tokens or section.pad_vocab_to:
        if section.new_tokens or section.new_special_tokens:
            _, tokens = tokenizer_of(section, source)
        before = spec_of(config, source, dtype).vocab
        rows = tokens.padded_vocab(before, section.pad_vocab_to)
        config = with_text_fields(config, {"vocab_size": rows})
        method = _with_rows(method, tokens, tuple(range(before, rows)))
    if blocks:
        config = expanded_config(config, blocks)
    spec = spec_of(config, source, dtype, vision=recipe.vision is not None)
    if recipe.vision is None and config.get("model_type") in BOTH_WAYS:
        raise UserError(
            f"a {config['model_type']} reads its prompt both ways, which its text model by itself does not",
            where="vision",
            fix="add a section vision to the recipe, which may be empty ({}): texts without pictures are trained too",
        )
    if recipe.rollout is not None and config.get("model_type") in BOTH_WAYS:
        raise UserError(
            f"a {config['model_type']} reads its prompt both ways, which the rows of an online stage do not hold",
            where="stage.kind",
            fix="tune it by a stage with given answers, such as sft or dpo",
        )
    if section.adapter is not None:
        assert method.adapters is not None, "the recipe has seen to it"
        check_result(adapter_directory(section.adapter))
        method = resumed_config(adapter_directory(section.adapter), spec_for_stage(spec, recipe), method.adapters)
    spec = group_layers(spec, blocks) if blocks else spec
    changed = section.changed or blocks > 0
    if changed:  # it is written in the checkpoint's dtype
        spec = dataclasses.replace(spec, published=None)
    if changed and method.changes_base:
        raise UserError(
            "loftq in several turns makes a base of its own, and this run has one already: the model it starts from",
            where="method.loftq_iterations, model",
            fix="set method.loftq_iterations=1, or make the start first and give it as model.path",
        )
    return Start(source, config, spec_for_stage(spec, recipe), method, tokens, blocks, changed)


def spec_for_stage(spec: ModelSpec, recipe: Recipe) -> ModelSpec:
    """The model with the head that the recipe's stage needs, and what balances the load of its experts.

    Raises: UserError for a reward model in other stages, for a loss of experts in a model without them, and for a rate
    of biases in a model that has none, or with a method whose result cannot hold them.
    """
    spec = with_aux_loss(spec, recipe.model.router_aux_loss)
    spec = with_bias_update_rate(spec, recipe.model.router_bias_update_rate)
    if recipe.model.router_bias_update_rate and recipe.method.resolved().adapters is not None:
        raise UserError(
            f"method {recipe.method.kind} writes an adapter, which has no place for the correction biases of routers: "
            "over the published model it would choose other experts than the ones it was trained with",
            where="model.router_bias_update_rate, method",
            fix="use method: full or freeze, or leave model.router_bias_update_rate out",
        )
    scores = STAGES[recipe.stage.kind].has_score_head
    if spec.scored and not scores:
        raise UserError(
            f"this is a reward model: it gives a score, and stage {recipe.stage.kind} learns the next token",
            where="model.path",
            fix="give the causal language model, or use stage: rm",
        )
    return scored_spec(spec) if scores else spec


def adapter_directory(named: str) -> pathlib.Path:
    """The directory of an adapter that a recipe names: itself, its run's, or that of a state of its run."""
    path, state = split_state(named)
    if state is not None:
        return state_result(path, state)
    return path / ADAPTER if is_run(path) else path


def _with_rows(method: Method, tokens: NewTokens, added: tuple[int, ...]) -> Method:
    """The method that trains the rows of new tokens, where it does not train the whole embedding."""
    rows = tuple(sorted({*tokens.ids, *added}))
    if tokens.ids and not method.trains_token_rows:
        raise UserError(
            f"method {method.kind} would not train the embeddings of the new tokens",
            where="model.new_tokens, method",
            fix="use method: lora, which trains their rows, or full; with freeze name embed_tokens in method.modules",
        )
    return method.with_token_rows(rows) if rows else method
