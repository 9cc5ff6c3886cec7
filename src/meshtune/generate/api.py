"""The Python API: loads a model, and adapters over it; gives logits, text and chats."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from meshtune.adapters.merge import merge_adapters
from meshtune.arrays.tree import Tree, flatten, layer_site, unflatten
from meshtune.data.tokenizer import check_vocabulary, load_tokenizer
from meshtune.errors import UserError
from meshtune.families import float16_obstacle
from meshtune.generate.chat import ChatSession, Overflow
from meshtune.generate.driver import Driver, driver_for
from meshtune.generate.engine import Engine
from meshtune.generate.pictures import TokenPrompt
from meshtune.generate.programs import STEPS, every_logit, token_rows
from meshtune.generate.request import Sampling, Token
from meshtune.generate.target_log_probs import (
    Progress,
    TargetLogProbs,
    TargetText,
    target_log_probs,
    token_log_probabilities,
)
from meshtune.generate.text import chat_prompt, continuation_ids, pieces, text_end, turn_end
from meshtune.generate.weights import BatchCaches, Weights
from meshtune.kernels.chips import chip_of
from meshtune.mesh.config import AXES, MeshConfig, resolve_mesh
from meshtune.mesh.layout import Layout, make_mesh
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.model.compute import Compute
from meshtune.model.gather import check_experts, layout_for
from meshtune.model.inputs import fold_rows
from meshtune.model.model_cache import check_cache
from meshtune.model.spec import ModelSpec
from meshtune.quantize.config import UNQUANTISED, FormatName, QuantizeConfig, check_format
from meshtune.quantize.formats import FORMATS
from meshtune.quantize.weight import QuantisedWeight
from meshtune.runs.sources import Source, find
from meshtune.weights.load import MODEL_DTYPES, load_config, load_params, load_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.adapters.peft_format import LoadedAdapter
    from meshtune.config.sections import VisionSection
    from meshtune.data.pictures.reader import PictureReader


def tokenizer_on_disk(source: Source, vocab: int) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a source that has its files; None where it may be one to download, which can wait."""
    if not (Path(source.tokenizer) / "tokenizer.json").is_file():
        return None
    tokenizer = load_tokenizer(source.tokenizer, source.chat_template)
    check_vocabulary(tokenizer, vocab)
    return tokenizer


def base_quantisation(
    quantize: QuantizeConfig | str | None, adapters: Mapping[str, LoadedAdapter]
) -> QuantizeConfig | None:
    """How the base of some adapters is to be quantised: with "auto" as they were trained on it. Raises UserError where
    they differ, and for an unknown format."""
    if quantize == "auto":
        trained_on = {name: adapter.base.quantised for name, adapter in adapters.items()}
        if len(set(trained_on.values())) > 1:
            listed = ", ".join(f"{name}: {config or 'none'}" for name, config in trained_on.items())
            raise UserError(
                f"the adapters were trained on bases that are quantised differently ({listed})",
                where="quantize",
                fix="say how the base is to be held (quantize: nf4, int8, fp8, int4 or none), or load them one by one",
            )
        return next(iter(trained_on.values()), None)
    if quantize is None or isinstance(quantize, QuantizeConfig):
        return quantize
    check_format(quantize, (*FORMATS, UNQUANTISED))
    return QuantizeConfig(cast(FormatName, quantize), requantise=quantize != UNQUANTISED)


def generation_layout(mesh: MeshConfig | Mapping[str, int] | None, spec: ModelSpec) -> Layout | None:
    """How a model that generates is sharded over all devices of the job; None on one device.

    Raises UserError for a mesh that the devices or the model do not allow, for cp, and for several processes without a
    mesh.
    """
    if mesh is None:
        if jax.process_count() > 1:
            raise UserError(
                f"{jax.process_count()} processes share one model only on a mesh",
                where="mesh",
                fix=f"give one, such as mesh.tp={jax.device_count()} (in Python mesh={{'tp': {jax.device_count()}}}), "
                "or mesh=run for that of a run",
            )
        return None
    config = mesh if isinstance(mesh, MeshConfig) else mesh_of(mesh)
    check_experts(config.ep, spec)
    if config.cp != 1:
        raise UserError(
            f"cp={config.cp} splits the sequences of training, and generation reads a token at a time",
            where="mesh.cp",
            fix="give its devices to mesh.tp or mesh.fsdp; a model that was tuned with cp can be used on any mesh",
        )
    if config.sizes == MeshConfig().sizes and jax.process_count() == 1:
        return None
    config = resolve_mesh(config, jax.device_count())
    return None if config.devices == 1 else layout_for(make_mesh(config), spec)[0]


def sees(directory: Path) -> bool:
    """Whether a model directory has a tower that is implemented here, and says how pictures are prepared for it."""
    from meshtune.data.pictures.families import FAMILIES
    from meshtune.families.composite import BOTH_WAYS
    from meshtune.families.vision import TOWERS

    kind = load_config(directory).get("model_type")
    prepared = any((directory / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))
    if not (prepared or kind in BOTH_WAYS) or kind not in FAMILIES.keys() & TOWERS.keys():
        return False
    try:
        return load_spec(directory, vision=True)[0].vision is not None
    except UserError:  # its tower is not implemented: the text model is used without it
        return False


def mesh_of(sizes: Mapping[str, int]) -> MeshConfig:
    """The mesh with these sizes of axes. Raises UserError for an unknown axis and an impossible size."""
    for axis in sizes:
        if axis not in AXES:
            raise UserError(f"a mesh has no axis '{axis}'", where=f"mesh.{axis}", fix=f"one of {', '.join(AXES)}")
    return dataclasses.replace(MeshConfig(), **sizes)


def read_adapters(
    sources: Mapping[str, Source], base: Path, spec: ModelSpec, *, rewards: bool
) -> dict[str, LoadedAdapter]:
    """The adapters of the sources that have one, on the default device.

    Raises UserError where a source is over another base than `base`, for adapters that do not fit it, and for reward
    models unless `rewards` allows them.
    """
    from meshtune.adapters.peft_format import check_base, load_adapter
    from meshtune.weights.inspect import base_hash

    adapters: dict[str, LoadedAdapter] = {}
    for name, source in sources.items():
        if source.base.resolve() != base.resolve():
            raise UserError(f"'{name}' is over another base, {source.base}", where=name, fix=f"give adapters of {base}")
        if source.adapter is not None:
            adapters[name] = load_adapter(source.adapter, spec)
            check_base(adapters[name], str(base), base_hash(base))
        if not rewards and (spec.scored or (name in adapters and adapters[name].spec.scored)):
            raise UserError(
                "this is a reward model: it gives a text a score, and writes none",
                where=str(source.adapter or base),
                fix="give the model it was made from, or load it with transformers' AutoModelForSequenceClassification",
            )
    return adapters


SHARE = 0.5  # of the memory that the base leaves free, which merged weights may take: caches need room as well


@dataclasses.dataclass(frozen=True)
class Merging:
    """The choice, with its reason."""

    merges: bool
    reason: str

    def __str__(self) -> str:
        return f"{'merged' if self.merges else 'not merged'} ({self.reason})"


def plan_merging(choice: bool | None, adapters: Mapping[str, LoadedAdapter], params: Tree, job: Job) -> Merging | None:
    """Whether the one of `adapters` is merged into a copy of its weights of the base `params`; None without adapters.

    `choice` None merges where nothing is against it and the copy takes at most half of the memory that is free.
    Raises UserError where merging is asked for and impossible.
    """
    obstacle = _obstacle(adapters, params)
    if choice and obstacle is not None:
        raise UserError(f"no adapter can be merged: {obstacle}", where="--merge", fix="leave --merge out")
    if not adapters:
        return None
    if obstacle is not None or choice is not None:
        return Merging(bool(choice), obstacle or "asked for")
    ((_, adapter),) = adapters.items()
    size, free = _copied_bytes(adapter, params), job.minimum("free memory", [_free_bytes()])[0]
    sizes = (
        f"a second copy of the weights it adapts takes {size / 2**30:.2g} GiB of {free / 2**30:.3g} GiB that are free"
    )
    return Merging(size <= SHARE * free, sizes)


def _obstacle(adapters: Mapping[str, LoadedAdapter], params: Tree) -> str | None:
    """Why adapters cannot be merged, or should not; None if they can."""
    if len(adapters) != 1:
        return f"there are {len(adapters)} of them" if adapters else "there is none"
    if any(isinstance(leaf, QuantisedWeight) for leaf in flatten(params).values()):
        return "the base is quantised"
    ((_, adapter),) = adapters.items()
    if adapter.spec.tied and "head/adapter" in flatten(adapter.trainable):
        return "it adapts a head that is tied to the embedding"
    return None


def merged_copy(params: Tree) -> Tree:
    """Parameters with their adapters merged; weights that they adapt are copied first, and others are shared."""
    flat = flatten(params)
    for path in [path for path in flat if path.endswith("/adapter")]:
        weight = f"{path.removesuffix('/adapter')}/weight"
        flat[weight] = jnp.copy(flat[weight])
    return merge_adapters(unflatten(flat))


def _copied_bytes(adapter: LoadedAdapter, params: Tree) -> int:
    """Bytes on each device of the weights that an adapter adapts, however its layers are stacked: of all layers."""
    sites = {layer_site(path.rpartition("/")[0]) for path in flatten(adapter.trainable)}
    leaves = {path: leaf for path, leaf in flatten(params).items() if path.endswith("/weight")}
    adapted = [leaf for path, leaf in leaves.items() if layer_site(path.removesuffix("/weight")) in sites]
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in adapted)


def _free_bytes() -> int:
    """Memory of this process's first device that nothing holds."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


Messages = Sequence[Mapping[str, object]]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A loaded model: an engine with its tokenizer. `directory` is where the base was read from.

    Models whose engines have the same weights share a batch; `own_batch` is the reason why this one does not, where
    that was requested, `merging` whether its adapter is in its weights, and `picture_limits` says how large pictures
    were when it was tuned.
    """

    engine: Engine
    directory: Path
    load_tokenizer: Callable[[], PreTrainedTokenizerFast]
    stream_steps: int = 4  # tokens a piece when streaming
    own_batch: str | None = None
    merging: Merging | None = None
    picture_limits: VisionSection | None = None

    def __repr__(self) -> str:
        spec = self.spec
        return f"Model({spec.family}, {spec.layers} layers of {spec.embed}, {self.compute.dtype}, {self.directory})"

    @property
    def params(self) -> Tree:
        """The parameter tree as `meshtune.model.spec.abstract_params(spec)` describes it, with an adapter's arrays
        beside the weights they adapt."""
        return self.engine.params

    @property
    def spec(self) -> ModelSpec:
        """The shapes and blocks of the model."""
        return self.engine.spec

    @property
    def compute(self) -> Compute:
        """The dtype, and the layout over devices."""
        return self.engine.compute

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end any text."""
        return self.engine.stop_ids

    @property
    def driver(self) -> Driver | None:
        """The order of computations on a mesh."""
        return self.engine.driver

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer. Raises UserError if there is none, or if it knows more tokens than the model."""
        tokenizer = self.load_tokenizer()
        check_vocabulary(tokenizer, self.spec.vocab)
        return tokenizer

    @functools.cached_property
    def picture_reader(self) -> PictureReader | None:
        """The reader of pictures for the model; None where it reads text only. Raises UserError as making it does."""
        if self.spec.vision is None:
            return None
        from meshtune.config.sections import VisionSection
        from meshtune.data.pictures.families import picture_reader

        reader = picture_reader(self.directory, self.picture_limits or VisionSection(), self.tokenizer)
        reader.check_tower(self.spec.vision, str(self.directory))
        return reader

    def replace_params(self, params: Tree) -> None:
        """Replaces the parameters that everything here computes with; see `Engine.replace_params`."""
        self.engine.replace_params(params)

    def logits(self, token_ids: ArrayLike | Sequence[object]) -> Float[np.ndarray, "B T V"]:
        """float32 logits of every position. `token_ids` is one row of ids, or rows of one length (lists or arrays).

        Raises UserError for rows of different lengths, and for ids that the model does not have.
        """
        ids = token_rows(token_ids, self.spec.vocab)
        with self.engine.computing("logits", token_ids=ids):
            return every_logit(self.params, self.spec, self.compute, ids)

    def target_log_probs(self, texts: Sequence[TargetText], progress: Progress | None = None) -> list[TargetLogProbs]:
        """The log-probabilities of tokens of many texts; a beginning that several share is read once.

        Raises UserError for texts with pictures in several processes.
        """
        if jax.process_count() > 1 and any(text.pictures is not None for text in texts):
            raise UserError(
                "log-probabilities of texts with pictures are computed by one process",
                fix="leave the loss out (--no-loss), or run it in one process",
            )
        with self.engine.computing("target_log_probs", texts=list(texts)):
            return target_log_probs(self.params, self.spec, self.compute, texts, progress)

    def token_log_probabilities(self, ids: list[int], alternatives: int = 0) -> list[Token]:
        """Every token of one text but the first, with its log-probability and the likeliest tokens in its place."""
        with self.engine.computing("token_log_probabilities", ids=ids, alternatives=alternatives):
            return token_log_probabilities(self.params, self.spec, self.compute, ids, alternatives)

    def batch_caches(self) -> BatchCaches:
        """The caches of a new batch; see generate.driver."""
        return self.engine.batch_caches()

    def repeat(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Computes what process 0 announced; see generate.driver."""
        repeated = (self.logits, self.target_log_probs, self.token_log_probabilities, self.engine.weights.replace)
        {method.__name__: method for method in repeated}[call](**arguments)

    @overload
    def generate(self, prompt: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[Any], **options: Any) -> Any: ...
    def generate(
        self,
        prompt: str | Sequence[str] | Messages | Sequence[Messages],
        *,
        max_tokens: int | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        batch_size: int = 16,
        **sampling: float,
    ) -> str | list[str]:
        """Generates the text after `prompt`, without the prompt: a string, or a list of them for several prompts.

        A prompt is text to continue, or a conversation to answer ([{"role": "user", "content": "..."}]), rendered by
        the chat template. Content may be a list of parts, {"type": "text", "text": "..."} and, for a model that sees,
        {"type": "image", "image": FILE}, a path, data URI, bytes or PIL image. `max_tokens`, which may also be called
        `max_new_tokens`: at most this many new tokens (default 256, or what the context has room for). `stop`: strings
        that end the text and are not part of it. `batch_size`: prompts computed at once. `sampling`: temperature
        (default 0, greedy), top_k, top_p, min_p, repetition_penalty, seed; see `Sampling`. Raises UserError for empty
        and over-long prompts, a chat without a chat template, numbers out of range.
        """
        how, max_tokens = _sampling(sampling), _token_limit(max_tokens, max_new_tokens)
        if isinstance(prompt, str):
            return "".join(self._stream(prompt, how, max_tokens, stop))
        if len(prompt) and isinstance(prompt[0], Mapping):
            return "".join(self._stream(prompt, how, max_tokens, stop))  # pyright: ignore[reportArgumentType]
        if batch_size < 1:
            raise UserError(f"batch_size = {batch_size}", fix="give 1 or more")
        answers: list[str] = []
        for start in range(0, len(prompt), batch_size):
            group = prompt[start : start + batch_size]
            # Prompt number i draws with seed + i, however many are computed at once.
            row_sampling = dataclasses.replace(how, seed=how.seed + start)
            rows = self._pieces(group, row_sampling, max_tokens=max_tokens, stop=stop, steps=None)
            answers += map("".join, zip(*rows, strict=True))
        return answers

    def stream(
        self,
        prompt: str | Messages,
        *,
        max_tokens: int | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        **sampling: float,
    ) -> Iterator[str]:
        """The same text as `generate` gives for one prompt, piece by piece: whole characters only."""
        return self._stream(prompt, _sampling(sampling), _token_limit(max_tokens, max_new_tokens), stop)

    def _stream(
        self, prompt: str | Messages, sampling: Sampling, max_tokens: int | None, stop: str | Sequence[str]
    ) -> Iterator[str]:
        rows = self._pieces([prompt], sampling, max_tokens=max_tokens, stop=stop, steps=self.stream_steps)
        return (text for (text,) in rows if text)

    def chat(
        self,
        system: str | None = None,
        *,
        max_tokens: int | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        overflow: Overflow = "error",
        notify: Callable[[str], None] | None = None,
        **sampling: float,
    ) -> ChatSession:
        """A conversation with a memory: `.send`, `.stream`, `.messages`, `.reset`; see `ChatSession`."""
        options = {} if notify is None else {"notify": notify}
        return ChatSession(
            self,
            system,
            sampling=_sampling(sampling),
            max_tokens=_token_limit(max_tokens, max_new_tokens),
            stop=_strings(stop),
            overflow=overflow,
            **options,
        )

    def _pieces(
        self,
        prompts: Sequence[Any],
        sampling: Sampling,
        *,
        max_tokens: int | None,
        stop: str | Sequence[str],
        steps: int | None,
    ) -> Iterator[list[str]]:
        chats = [not isinstance(prompt, str) for prompt in prompts]
        if any(chats) and not all(chats):
            raise UserError("texts and conversations are mixed", fix="give prompts of one kind")
        if all(chats):
            read = [chat_prompt(self.tokenizer, prompt, self.picture_reader) for prompt in prompts]
        else:
            read = [TokenPrompt(continuation_ids(self.tokenizer, prompt)) for prompt in prompts]
        turn_ids, turn_strings = turn_end(self.tokenizer) if all(chats) else (frozenset(), ())
        return pieces(
            self.engine,
            self.tokenizer,
            read,
            sampling,
            max_tokens=max_tokens,
            stop=(*_strings(stop), *turn_strings),
            stop_ids=self.stop_ids | turn_ids,
            continued=not all(chats),
            steps=STEPS if steps is None else steps,
        )


def load(
    path: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    quantize: QuantizeConfig | str | None = "auto",
    cache: Literal["int8"] | None = None,
    mesh: MeshConfig | Mapping[str, int] | None = None,
    revision: str | None = None,
    chat_template: str | None = None,
    tokenizer: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Loads a model for use.

    `path` is a model directory, a GGUF file, a hub id, an adapter directory (its base is found by what it records), or
    that of a run. `adapter` is a PEFT adapter (or a run with one), which is added to the weights of the base at
    `path`. `dtype` is that of weights and computation (default: float32 on a CPU, bfloat16 elsewhere), `quantize` the
    base's format (nf4, int8, fp8, int4, a QuantizeConfig, or "none"; default: what the adapter was trained on). `cache`
    "int8" holds keys and values in 8 bits where text is generated. `mesh` has the devices along its axes, such as
    {"tp": 4}, over which weights and caches are sharded. `chat_template` is a Jinja file or the name of one that ships
    with Meshtune, `tokenizer` a directory or hub id of another tokenizer. `progress(done, total)` is called in bytes.
    Raises UserError for a path that is none of these, an adapter for another base, damaged or unfit files or caches.
    """
    source = find(path, adapter, revision=revision, chat_template=chat_template, tokenizer=tokenizer)
    return load_variants({"": source}, dtype=dtype, quantize=quantize, cache=cache, mesh=mesh, progress=progress)[""]


def load_variants(
    sources: Mapping[str, Source],
    *,
    dtype: str | None = None,
    quantize: QuantizeConfig | str | None = "auto",
    cache: str | None = None,
    mesh: MeshConfig | Mapping[str, int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    rewards: bool = False,
    share_batch: bool = False,
    merge: bool | None = False,
    job: Job = SINGLE_PROCESS,
    beside: Sequence[Model] = (),
) -> dict[str, Model]:
    """Models over one base, each with the adapter of its source, or none: the base is in memory once.

    `rewards` allows reward models, whose `logits` are scores; they generate nothing. With `share_batch` the base and
    those adapters that can share their weights, and so a batch. By `merge`, or where that is None and memory allows, an
    adapter that is alone is merged into its own copy of the weights (generate.merging). The processes of `job` share
    the models, and those loaded before `beside` them: all load the same ones, and process 0 then says what is computed
    (generate.driver.run_on_all). For the other options and errors see `load`; sources of different bases are an error.
    """
    from meshtune.adapters.adapter_set import AdapterSet, needs_own_batch
    from meshtune.adapters.peft_format import attach, load_adapter

    base = next(iter(sources.values())).base
    dtype = dtype or _default_dtype(base)
    if dtype not in MODEL_DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported", where="dtype", fix=f"one of {', '.join(MODEL_DTYPES)}")
    spec, _ = load_spec(base, dtype, vision=sees(base))
    layout = generation_layout(mesh, spec)
    compute = Compute(dtype=dtype, cache=check_cache(spec, cache), layout=layout)
    tokenizers = {name: tokenizer_on_disk(source, spec.vocab) for name, source in sources.items()}  # before the weights
    adapters = read_adapters(sources, base, spec, rewards=rewards)
    quantisation = base_quantisation(quantize, adapters)
    params = load_params(base, spec, layout=layout, quantize=quantisation, progress=progress)
    merging = plan_merging(merge, adapters, params, job)
    merges = merging is not None and merging.merges
    share_batch = share_batch and len(sources) > 1 and not spec.scored and not merges
    reasons = {name: needs_own_batch(adapter, spec) for name, adapter in adapters.items()} if share_batch else {}
    sharing = {name: adapters[name] for name, reason in reasons.items() if reason is None}
    adapter_set = AdapterSet.over(params, spec, sharing, layout) if sharing else None
    models: dict[str, Model] = {}
    driver = None if layout is None else driver_for(job, beside)
    shared = None if adapter_set is None else Weights(adapter_set.params, spec, compute, resident=True)
    for name, source in sources.items():
        weights: Tree | Weights = params
        number, variant, tokenizer = None, spec, tokenizers[name]
        if adapter_set is not None and shared is not None and reasons.get(name) is None:
            weights, number = shared, adapter_set.number(name)
        elif name in adapters:
            tree = params if len(sources) == 1 else jax.tree.map(lambda leaf: leaf, params)  # attach uses a tree up
            assert source.adapter is not None
            adapter = adapters[name] if layout is None else load_adapter(source.adapter, spec, layout)
            variant, adapted = attach(tree, spec, adapter)
            weights = merged_copy(adapted) if merges else fold_rows(adapted)
        download = functools.partial(load_tokenizer, source.tokenizer, source.chat_template)
        options: dict[str, Any] = {"resident": True, "adapter": number, "driver": driver}
        stops = text_end(source, tokenizer)
        models[name] = Model(
            Engine(weights, variant, compute, stops, model=len(beside) + len(models), **options),
            base,
            download if tokenizer is None else functools.partial(_identity, tokenizer),
            own_batch="merged" if merges and name in adapters else reasons.get(name),
            merging=merging if name in adapters else None,
            picture_limits=source.vision,
        )
    return models


def _sampling(options: Mapping[str, float]) -> Sampling:
    names = [field.name for field in dataclasses.fields(Sampling)]
    for name in options:
        if name not in names:
            raise TypeError(f"unknown option {name!r}; sampling takes {', '.join(names)}")
    return Sampling(**options)  # pyright: ignore[reportArgumentType]


def _token_limit(max_tokens: int | None, max_new_tokens: int | None) -> int | None:
    """The limit under whichever of its two names it was given; the second is that of transformers."""
    if max_tokens is not None and max_new_tokens is not None:
        raise UserError("max_tokens and max_new_tokens are two names of one limit", fix="give one of them")
    return max_new_tokens if max_tokens is None else max_tokens


def _strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _identity(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return tokenizer


def _default_dtype(base: Path) -> str:
    """The dtype in which a model is served here: bfloat16 where the chip multiplies it, else float16 where the model is
    not known to overflow in it."""
    if jax.default_backend() == "cpu":
        return "float32"
    if chip_of(jax.default_backend()).has_bfloat16:
        return "bfloat16"
    return "float16" if float16_obstacle(load_config(base)) is None else "float32"
