"""An adapter is exported when the written files, read again, give the logits of the trained model."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable

import jax
import numpy as np

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import SHARED, PreparedModel, of_adapters
from meshtune.adapters.peft_format import BaseRecord, attach, load_adapter, save_adapter
from meshtune.adapters.registry import ADAPTERS
from meshtune.arrays.tree import Tree, flatten, merge, unflatten
from meshtune.errors import UserError
from meshtune.mesh.placement import place_batch
from meshtune.mesh.processes import SINGLE_PROCESS, Job, raise_collectively
from meshtune.model.compute import Compute, compiler_options
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import inputs_of
from meshtune.model.spec import ModelSpec
from meshtune.weights.verify import probe_pictures

TOLERANCE = 1e-5  # of the largest logit: the same numbers in the same program; room only for chips that sum unsteadily
# Of the largest logit, where another kind is written than was trained: the same matrices, summed in another order. On
# SmolLM2-135M and random tokens the rounding of PiSSA's conversion moves logits by 3e-5.
CONVERTED = 2e-4


def export_adapter(
    dest: str | os.PathLike[str],
    model: PreparedModel,
    config: LoraConfig,
    base: BaseRecord,
    compute: Compute | None = None,
    job: Job = SINGLE_PROCESS,
) -> pathlib.Path:
    """`save_adapter`, verified before the directory gets its name. Raises UserError as that and `verify_adapter` do.

    Of a model on a mesh, `compute` has the layout.
    """

    trainable, form = ADAPTERS[config.adapter].exported(model.trainable, model.frozen, config)

    def check(path: pathlib.Path) -> None:
        verify_adapter(path, model, compute, job, TOLERANCE if form is config else CONVERTED)

    shared = model.frozen.get(SHARED)
    return save_adapter(dest, trainable, model.spec, form, base, shared=shared, check=check, job=job)


def verify_adapter(
    path: str | os.PathLike[str],
    model: PreparedModel,
    compute: Compute | None = None,
    job: Job = SINGLE_PROCESS,
    tolerance: float = TOLERANCE,
) -> float:
    """The largest difference of logits between `model` and the same frozen weights with the adapter read from `path`.

    In float32 unless `compute` says otherwise, on two rows of 16 tokens spread over the vocabulary.
    Raises UserError where it is above `tolerance` times the largest logit, or where logits are not finite.
    """
    compute = compute or Compute()
    with raise_collectively(job, "verify: adapter"):
        loaded = load_adapter(path, model.spec, compute.layout)
    weights = {name: leaf for name, leaf in flatten(model.frozen).items() if not of_adapters(name)}
    spec, params = attach(unflatten(weights), model.spec, loaded)
    trained = _probe(merge(model.trainable, model.frozen), model.spec, compute)
    written = _probe(params, spec, compute)
    with raise_collectively(job, "verify: logits"):
        return _compare_logits(trained, written, str(path), tolerance)


def _compare_logits(trained: np.ndarray, written: np.ndarray, where: str, tolerance: float) -> float:
    if not np.isfinite(trained).all():
        raise UserError(
            "the trained model gives logits that are not finite, so its export cannot be verified",
            where=where,
            fix="train again with a lower learning rate, or export an earlier checkpoint",
        )
    difference = float(np.abs(trained - written).max())
    if not difference <= tolerance * float(np.abs(trained).max()):
        raise UserError(
            f"the adapter as written differs from what was trained: logits by up to {difference:.3g}",
            where=where,
            fix="this is a defect of Meshtune; the run's checkpoints are not affected. Please report it",
        )
    return difference


def _probe(params: Tree, spec: ModelSpec, compute: Compute) -> np.ndarray:
    rows, length = 2, min(16, spec.max_length or 16)
    tokens = np.random.default_rng(0).integers(0, spec.vocab, (rows, length)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    batch |= probe_pictures(spec, tokens.shape)
    values = _program()(params, spec, compute, place_batch(batch, compute.layout))
    return np.asarray(values.addressable_data(0))


@functools.cache
def _program() -> Callable[..., jax.Array]:
    return jax.jit(_forward, static_argnums=(1, 2), compiler_options=compiler_options())


def _forward(params: Tree, spec: ModelSpec, compute: Compute, batch: dict[str, jax.Array]) -> jax.Array:
    inputs = inputs_of(batch)
    values = logits(params, spec, forward(params, spec, compute, inputs).hidden)
    return values if compute.layout is None else jax.lax.with_sharding_constraint(values, compute.layout.replicated)
