"""Resolves the other models of a run without reading weights: the teacher of a distillation, whose arrays are frozen
in the step, and reward models."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

import jax.numpy as jnp

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.continued import resume_adapter, resumed_config
from meshtune.adapters.method import PreparedModel, abstract
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.config.recipe import Recipe
from meshtune.config.rewards import ModelReward
from meshtune.data.prepare import open_reader
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.families.quantised import quantised_leaves
from meshtune.lazy import LazyFunction
from meshtune.mesh.layout import Layout
from meshtune.model.gather import layout_for
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.quantize.config import QuantizeConfig
from meshtune.runs.sources import ADAPTER_CONFIG, Source, find, is_run, split_state
from meshtune.weights.hub import CONFIG, locate
from meshtune.weights.load import load_params, load_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

picture_reader = LazyFunction("meshtune.data.pictures.families:picture_reader")


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The teacher of a run, without weights: `arrays` has ArraySpecs for arrays, of any adapter as `trainable`."""

    path: str
    source: Source
    quantize: QuantizeConfig | None
    arrays: PreparedModel

    @property
    def spec(self) -> ModelSpec:
        return self.arrays.spec

    @property
    def parameters(self) -> Tree:
        """One tree of all ArraySpecs."""
        return self.arrays.parameters

    def load(self, layout: Layout | None) -> Tree:
        """Loads the parameters, sharded by `layout`. Collective."""
        params = load_params(
            self.source.base, self.spec, layout=layout, quantize=self.quantize, plain=flatten(self.arrays.trainable)
        )
        if self.source.adapter is None:
            return params
        return resume_adapter(self.source.adapter, self.arrays, self.spec, params, layout).parameters

    def check_pictures(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raises UserError as the function `check_pictures`."""
        fix = "or generate answers with this one (meshtune predict) and learn them by stage: sft"
        check_pictures(recipe, tokenizer, self.source.base, "teacher", "teacher.path, model.path", fix)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raises UserError if the teacher has another tokenizer than the student."""
        ours, theirs = tokenizer.get_vocab(), load_tokenizer(self.source.tokenizer).get_vocab()
        if ours == theirs:
            return
        differing = next((token for token in ours if theirs.get(token) != ours[token]), None)
        token = differing or next(token for token in theirs if token not in ours)
        raise UserError(
            f"the teacher has another tokenizer: {token!r} is {theirs.get(token, 'no token')} in {self.path} and "
            f"{ours.get(token, 'no token')} in the student's, so their predictions are of other tokens",
            where="teacher.path, model.path",
            fix="use a teacher of the student's family and vocabulary; or generate answers with this one (meshtune "
            "predict) and learn them by stage: sft",
        )


def check_pictures(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, other: pathlib.Path, name: str, where: str, fix: str
) -> None:
    """Raises UserError if the model in `other`, called `name`, reads other patches of a picture than the one that is
    trained: both get the same."""
    if recipe.vision is None:
        return
    if open_reader(recipe, tokenizer).key() != picture_reader(other, recipe.vision, tokenizer).key():
        raise UserError(
            f"the {name} scales or cuts pictures in another way than the model, and both read the same patches",
            where=where,
            fix=f"use a {name} of the model's family with the same preprocessor_config.json; {fix}",
        )


def teacher_of(recipe: Recipe, dtype: str, student: ModelSpec, *, weights: bool = True) -> Teacher | None:
    """Resolves the teacher of a recipe that has one; its weights will be `dtype`. None for a server.

    Without `weights` the config of a teacher on a hub is enough. Raises: UserError for a teacher that does not exist,
    and for one without predictions over the student's vocabulary.
    """
    section = recipe.teacher
    assert section is not None
    if section.is_server:
        return None
    source = (find if weights else _find_config)(section.path, revision=section.revision)
    spec, _ = load_spec(source.base, dtype, vision=recipe.vision is not None)
    if spec.scored:
        raise UserError(
            "the teacher is a reward model: it gives scores, and predicts no tokens",
            where="teacher.path",
            fix="give a causal language model",
        )
    if source.adapter is None:
        leaves = quantised_leaves(flatten(abstract_params(spec)), section.quantize, spec)
        arrays = PreparedModel(spec, {}, unflatten(flatten(abstract_params(spec)) | leaves))
    else:
        arrays = abstract(resumed_config(source.adapter, spec, LoraConfig()), spec, dtype, section.quantize)
    if arrays.spec.vocab != student.vocab:
        larger = arrays.spec.vocab > student.vocab
        raise UserError(
            f"the teacher predicts {arrays.spec.vocab:,} tokens ({section.path}) and the student {student.vocab:,} "
            f"({recipe.model.path}): predictions over different vocabularies cannot be compared",
            where="teacher.path, model.path",
            fix=f"where both have the same tokenizer, set model.pad_vocab_to: {arrays.spec.vocab}, which gives the "
            "student as many rows; else use a teacher of the student's family"
            if larger
            else "use a teacher of the student's family with as many rows",
        )
    return Teacher(section.path, source, section.quantize, arrays)


def _find_config(path: str, revision: str | None = None) -> Source:
    """The source of a model; of one on a hub only the config is fetched."""
    directory, _ = split_state(path)
    if is_run(directory) or (directory / ADAPTER_CONFIG).is_file():
        return find(path, revision=revision)
    return Source(locate(path, revision, allow=CONFIG), None, path, None)


def reward_model_bytes(recipe: Recipe, backend: str) -> dict[str, float]:
    """Bytes of every reward model by its path, all on one device, in the dtype that rollout.reward_model computes in.

    Adapters are not counted. Raises: UserError for a model that does not exist.
    """
    dtype = "float32" if backend == "cpu" else "bfloat16"
    paths = dict.fromkeys(reward.model for reward in recipe.rewards if isinstance(reward, ModelReward))
    specs = {path: load_spec(_find_config(path).base, dtype)[0] for path in paths}
    return {
        path: sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in flatten(abstract_params(spec)).values())
        for path, spec in specs.items()
    }


def with_teacher_axes(layout: Layout | None, teacher: Teacher) -> Layout | None:
    """The layout for both models: what tp cannot split in either is whole in both.

    Raises: UserError for a mesh that the teacher does not support.
    """
    if layout is None:
        return layout
    other, _ = layout_for(layout.mesh, teacher.spec)
    return dataclasses.replace(layout, tp_replicated=layout.tp_replicated | other.tp_replicated)
