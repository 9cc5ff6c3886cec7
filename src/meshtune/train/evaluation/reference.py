"""Log-probabilities of the reference model: computed once for all answers of a data store, and cached on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.arrays.tree import Tree
from meshtune.config.recipe import Recipe
from meshtune.data.loader import Loader, Units
from meshtune.data.tokenizer import load_tokenizer
from meshtune.digests import DamagedError, digest_bytes
from meshtune.errors import UserError
from meshtune.kernels.attention import zigzag_order
from meshtune.mesh.placement import place_batch
from meshtune.model.compute import Compute, compiler_options
from meshtune.model.gather import layout_for
from meshtune.model.spec import ModelSpec
from meshtune.objectives.answers import answer_log_probs
from meshtune.runs.output import weights_digests
from meshtune.setup.stage import BASE, CACHED, reference_of
from meshtune.setup.teacher import check_pictures
from meshtune.train.run_setup import PreparedRun
from meshtune.weights.hub import MODEL, locate
from meshtune.weights.inspect import base_hash
from meshtune.weights.load import load_params, load_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DIGEST_BYTES = 32  # hex digits at the end of a file


def read_log_probabilities(file: pathlib.Path, documents: int) -> np.ndarray | None:
    """The log-probabilities in a file, float32 [documents]; None where there is none.

    Raises: DamagedError where the file does not end in the digest of what comes before it.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{file.name} cannot be read: {error.strerror}", where=str(file)) from error
    array, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if digest_bytes(array).encode() != digest:
        raise DamagedError(f"{file.name} is damaged: its contents are not those that were written", where=str(file))
    values = np.load(io.BytesIO(array), allow_pickle=False)
    assert values.shape == (documents,), "the file's name is a digest of the data"
    return values


def write_log_probabilities(file: pathlib.Path, values: np.ndarray) -> None:
    """Writes log-probabilities and their digest, as one atomic replacement.

    Raises: UserError for values that are not finite, and where the file cannot be written.
    """
    if not np.isfinite(values).all():
        raise UserError(
            "the reference gives log-probabilities that are not finite",
            where="stage.reference",
            fix="use compute.precision=float32, or another reference",
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=file.parent, prefix=".writing-", suffix=".npy")
        with os.fdopen(descriptor, "wb") as stream:
            array = io.BytesIO()
            np.save(array, values)
            stream.write(array.getvalue() + digest_bytes(array.getvalue()).encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, file)
    except OSError as problem:
        raise UserError(
            f"the reference's log-probabilities cannot be written: {problem.strerror or problem}",
            where=str(file.parent),
            fix="make room there, or set MESHTUNE_CACHE to a directory that can be written",
        ) from problem


VERSION = 3  # of the computation: increase it when the same model and data give different values


@dataclasses.dataclass(frozen=True)
class Reference:
    """Computes the reference log-probabilities of a run, or reads them from the cache, for the loaders."""

    run: PreparedRun

    @property
    def chosen(self) -> str:
        """CACHED, the name of another model, or BASE.

        BASE needs no precomputation: the stage has no reference, or the step computes it with adapters disabled.
        """
        choice = reference_of(self.run.recipe, self.run.method)
        return BASE if choice is None else choice.value

    def from_model(self) -> None:
        """Gives the loaders the log-probabilities of another model; does nothing for BASE and CACHED.

        Raises: UserError for a model that does not exist or has a different tokenizer.
        """
        if self.chosen in (BASE, CACHED):
            return
        directory = locate(self.chosen, None, allow=MODEL)
        spec, _ = load_spec(directory, self.run.precision.frozen, vision=self.run.recipe.vision is not None)
        _same_tokens(directory, self.chosen, self.run.tokenizer, spec, self.run.spec)
        where, fix = f"stage.reference, {self.chosen}", "or reference: auto"
        check_pictures(self.run.recipe, self.run.tokenizer, directory, "reference", where, fix)
        layout = self.run.layout and layout_for(self.run.layout.mesh, spec)[0]
        compute = dataclasses.replace(self.run.compute, layout=layout)
        loaded: list[Tree] = []

        def params() -> Tree:
            if not loaded:
                self.run.console.print(f"loading the reference, {self.chosen}")
                loaded.append(load_params(directory, spec, layout=layout))
            return loaded[0]

        self._give(_origin(base_hash(directory), directory), params, spec, compute)

    def from_start(self, params: Tree, spec: ModelSpec) -> None:
        """Gives the loaders the log-probabilities of the run's initial model `params`."""
        if self.chosen != CACHED:
            return
        origin = _origin(self.run.start_hash, self.run.source) | made_start(self.run.recipe)
        self._give(origin, lambda: params, spec, self.run.compute)

    def _give(
        self, origin: Mapping[str, object], params: Callable[[], Tree], spec: ModelSpec, compute: Compute
    ) -> None:
        tail = getattr(self.run.recipe.stage, "ld_alpha", None)
        for split, loader in (("train", self.run.data.train), ("validation", self.run.data.validation)):
            if not isinstance(loader, Loader):
                continue
            facts = {
                **origin,
                "version": VERSION,
                "data": loader.store.path.name,
                "precision": dataclasses.asdict(self.run.precision),
                "tail": tail,
            }
            key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
            file = loader.store.path.parent.parent / "references" / f"{key}.npy"
            documents = len(loader.store)
            values = self._read_cache(file, documents)
            if not self.run.job.all(f"reference: {split}", values is not None):
                self.run.console.print(f"computing the reference's log-probabilities of the {split} data")
                values = log_probabilities(params(), spec, compute, loader, tail)
                if self.run.job.is_main_process:
                    write_log_probabilities(file, values)
            assert values is not None
            assert loader.units is not None
            loader.units = dataclasses.replace(loader.units, reference=values)

    def _read_cache(self, file: pathlib.Path, documents: int) -> np.ndarray | None:
        """Reads the cached log-probabilities; None if there are none or, with a message, if the file is damaged."""
        try:
            return read_log_probabilities(file, documents)
        except DamagedError as error:
            fault = f"{error.what} ({error.where})"
            self.run.console.print(f"the cached log-probabilities of the reference are not used: {fault}")
            return None


def _origin(base: str | None, directory: pathlib.Path) -> dict[str, object]:
    """Identifies the model in `directory`, whose hash is `base`, by every byte of its weights."""
    return {"model": base, "weights": weights_digests(directory)}


def made_start(recipe: Recipe) -> dict[str, object]:
    """Returns the recipe fields that determine the initial weights of a run, apart from the base."""
    fields = recipe.model_dump(mode="json")
    facts = {name: fields[name] for name in ("method", "seed", "quantize")}
    if getattr(recipe.method, "loftq_calibration", 0):  # calibration depends on the first rows of the data
        facts["rows"] = [recipe.data.model_dump(mode="json"), recipe.train.batch_size, recipe.train.accumulation]
    return facts


def log_probabilities(
    params: Tree, spec: ModelSpec, compute: Compute, loader: Loader, tail: float | None = None
) -> np.ndarray:
    """Returns the answer log-probability of each document of a loader's store, in store order: float32 [documents]."""
    rows = loader.batch_size // loader.accumulation
    pictures = loader.pictures
    ordered = Loader(
        loader.store,
        max_length=loader.row_length // 2,
        batch_size=rows,
        packing=loader.packing,
        shuffle=False,
        units=Units(),
        pictures=None if pictures is None else pictures.reader,
        max_patches=None if pictures is None else pictures.sizes[0],
    )

    def both(params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
        pair = answer_log_probs(params, spec, compute, batch, None, tail=tail)
        return jnp.stack([pair.first, pair.second], axis=-1)

    layout = compute.layout
    options = None if compute.dtype == "float32" else compiler_options(compute.platform)
    step = jax.jit(both, out_shardings=None if layout is None else layout.replicated, compiler_options=options)
    cp = 1 if layout is None else layout.size("cp")
    order = zigzag_order(ordered.row_length, cp) if cp > 1 else None
    log_probs = np.zeros((len(loader.store) // 2, 2), np.float32)
    planned = ordered.rows(0)
    for number in range(ordered.steps_per_epoch(0)):
        arrays = {name: array[0] for name, array in ordered.batch(number).arrays.items()}
        outputs = np.asarray(step(params, place_batch(arrays, layout, order)).addressable_data(0))
        for place in range(min(rows, len(planned) - number * rows)):
            pairs = planned[number * rows + place]
            log_probs[pairs] = outputs[place, : len(pairs)]
    return log_probs.ravel()


def _same_tokens(
    directory: pathlib.Path, name: str, tokenizer: PreTrainedTokenizerFast, theirs: ModelSpec, ours: ModelSpec
) -> None:
    reference_tokenizer = load_tokenizer(directory)
    run_vocab, reference_vocab = tokenizer.get_vocab(), reference_tokenizer.get_vocab()
    if run_vocab != reference_vocab:
        differing = next((token for token in run_vocab if reference_vocab.get(token) != run_vocab[token]), None)
        token = differing or next(token for token in reference_vocab if token not in run_vocab)
        raise UserError(
            f"the reference has another tokenizer: {token!r} is {reference_vocab.get(token, 'no token')} there and "
            f"{run_vocab.get(token, 'no token')} here, so its log-probabilities would be of other tokens",
            where=f"stage.reference, {name}",
            fix="use a model of the same family and vocabulary, or reference: auto",
        )
    if max(run_vocab.values()) >= theirs.vocab:
        raise UserError(
            f"the reference knows {theirs.vocab} tokens and the data have ids up to {max(run_vocab.values())}",
            where=f"stage.reference, {name}",
            fix="use a model of the same family and vocabulary, or reference: auto",
        )
