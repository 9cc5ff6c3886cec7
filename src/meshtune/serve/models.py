"""The models that a server offers, each with the thread that computes its answers."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax

import meshtune
from meshtune.errors import UserError
from meshtune.generate.api import Model, load_variants
from meshtune.generate.config import Sampling
from meshtune.generate.prompts import turn_end
from meshtune.generate.text import Place, TokenBytes, special_ids
from meshtune.generate.weights import Weights
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.model.model_cache import describe_cache
from meshtune.runs.sources import find
from meshtune.serve.errors import ApiError
from meshtune.serve.grammar import Grammars
from meshtune.serve.worker import Worker

VERSION = meshtune.__version__


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A model under the id that clients name."""

    id: str
    model: Model
    worker: Worker
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def running(self) -> int:
        """Requests that are computed."""
        return self.worker.scheduler.running_of(self.model.engine.adapter)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self.worker.scheduler.waiting_of(self.model.engine.adapter)

    @property
    def generated(self) -> int:
        """Tokens generated since the start."""
        return self.worker.tokens[self.model.engine.adapter]

    @property
    def fingerprint(self) -> str:
        """The version, dtype and cache that the numbers of an answer depend on."""
        cache = self.model.engine.compute.cache
        return f"meshtune-{VERSION}-{self.model.engine.compute.dtype}{f'-cache-{cache}' if cache else ''}"

    def response_head(self, prefix: str, name: str) -> dict[str, Any]:
        """The fields of a response or a chunk of a stream, but its choices."""
        head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.id}
        return head | {"system_fingerprint": self.fingerprint, "object": name}

    @property
    def cache(self) -> str:
        """A description of the cache's format."""
        return describe_cache(self.model.spec, self.model.compute.cache, self.model.compute.dtype)

    @cached_property
    def chat_stops(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """(token ids, strings) that end an answer in a conversation. Raises UserError for a model that cannot chat."""
        ids, strings = turn_end(self.model.tokenizer)
        return self.model.engine.stop_ids | ids, strings

    @cached_property
    def chat_grammars(self) -> Grammars:
        """Compiles what answers in conversations must be like."""
        return Grammars(self.model.tokenizer, self.model.spec.vocab, self.chat_stops[0])

    @cached_property
    def longest_text(self) -> int:
        """Characters that the context can hold, at most: each token as long as the longest."""
        return self.model.engine.context * max(map(len, self.model.tokenizer.get_vocab()))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.model.tokenizer)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that texts leave out."""
        return special_ids(self.model.tokenizer)

    def token_text(self, id_: int, content: bytes | None, escaped: str = "") -> str:
        """A token as clients read it: its text, its name where texts leave it out (None), or `escaped` and the bytes
        of a part of a character."""
        if content is None:
            return str(self.model.tokenizer.convert_ids_to_tokens(id_))
        try:
            return content.decode()
        except UnicodeDecodeError:
            return escaped + "".join(f"\\x{byte:02x}" for byte in content)

    def alternative(self, id_: int, place: Place) -> bytes | None:
        """The bytes that another token would have at a place."""
        if id_ in self.special_ids:
            return None
        content = self.token_bytes[id_]
        if not (place.begins and content.startswith(b" ")):
            return content
        return str(self.model.tokenizer.decode([id_], clean_up_tokenization_spaces=False)).encode()

    def check_text(self, text: str, param: str) -> None:
        """Raises ApiError for a text that no tokens of the context can hold, before it is tokenised."""
        if len(text) > self.longest_text:
            context = self.model.engine.context
            message = (
                f"a text of {len(text)} characters is longer than the model's context of {context} tokens can hold"
            )
            raise ApiError(400, f"{message} (at most {self.longest_text}); shorten it", param=param)

    def ids(self, text: str, special: bool) -> list[int]:
        """The ids of a text, with `special` tokens at its beginning. Raises ApiError for one that is too long."""
        self.check_text(text, "prompt")
        return list(self.model.tokenizer(text, add_special_tokens=special)["input_ids"])  # pyright: ignore

    def text(self, ids: list[int]) -> str:
        """The text of ids, special tokens included. Raises ApiError for too many and for unknown ones."""
        vocab = self.model.spec.vocab
        if len(ids) > self.longest_text:
            raise ApiError(
                400, f"there are {len(ids)} tokens, and {self.longest_text} are read at most", param="tokens"
            )
        if max(ids, default=0) >= vocab:
            raise ApiError(400, f"tokens must be a list of token ids below {vocab}", param="tokens")
        return self.model.tokenizer.decode(ids, skip_special_tokens=False)  # pyright: ignore[reportReturnType]


class Models:
    """All models of a server. Those that share their weights share a batch. `rows` requests of each batch are computed
    at once, and `queue` may wait."""

    def __init__(self, models: dict[str, Model], *, rows: int, queue: int):
        self.workers: list[Worker] = []
        self._served: dict[str, Served] = {}
        worker_of: dict[Weights, Worker] = {}
        for name, model in models.items():
            weights = model.engine.weights
            if weights not in worker_of:
                worker_of[weights] = Worker(model.engine.scheduler(rows=rows, queue=queue), name)
                self.workers.append(worker_of[weights])
            self._served[name] = Served(name, model, worker_of[weights])

    def __iter__(self):
        return iter(self._served.values())

    def warm_up(self) -> None:
        """Compiles what a first request needs, before the workers start. Raises what keeps a model from answering."""
        for worker in self.workers:
            served = next(served for served in self if served.worker is worker)
            if served.model.engine.spec.scored:
                continue
            scheduler, engine = served.worker.scheduler, served.model.engine
            scheduler.submit(engine.request([0], Sampling(temperature=1.0), max_tokens=2))
            while not scheduler.idle:
                scheduler.step()

    def __getitem__(self, name: str) -> Served:
        """The model of this id. Raises ApiError (404)."""
        if name not in self._served:
            message = f"the model '{name[:200]}' does not exist; there are: {', '.join(self._served)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._served[name]

    def writer(self, name: str) -> Served:
        """The model of this id, to write texts. Raises ApiError (404, and 400 for a reward model)."""
        served = self[name]
        if served.model.engine.spec.scored:
            raise ApiError(400, f"'{name}' is a reward model: it scores texts (/v1/score/evaluation)", param="model")
        return served

    @property
    def capacity(self) -> int:
        """Requests that are taken at once, at most."""
        return sum(worker.scheduler.capacity or 0 for worker in self.workers)

    @property
    def batches(self) -> list[str]:
        """Which models share a batch, and why others do not, where there are several."""
        lines = []
        for worker in self.workers:
            sharing = [served for served in self if served.worker is worker]
            reason = sharing[0].model.own_batch
            lines.append(", ".join(served.id for served in sharing) + ("" if reason is None else f" ({reason})"))
        return lines if len(self._served) > 1 else []

    def banner(self) -> list[str]:
        """The lines that a server prints about its models when it starts."""
        model = self.first.model
        lines = [f"models   {', '.join(self._served)}"]
        lines += [f"{'' if number else 'batches':9}{batch}" for number, batch in enumerate(self.batches)]
        choices = dict.fromkeys(str(served.model.merging) for served in self if served.model.merging is not None)
        lines += [f"adapter  {choice}" for choice in choices]
        if (layout := model.compute.layout) is not None:
            processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
            lines.append(f"mesh     {MeshConfig(**layout.mesh.shape)}{processes}")
        return lines if model.compute.cache is None else [*lines, f"cache    {self.first.cache}"]

    @property
    def first(self) -> Served:
        """The model that is meant where none is named."""
        return next(iter(self))


def load_served(
    path: str,
    name: str | None,
    adapters: Mapping[str, str],
    *,
    dtype: str | None,
    quantize: str,
    cache: str | None = None,
    mesh: MeshConfig | None = None,
    merge: bool | None = False,
    job: Job = SINGLE_PROCESS,
    **options: str | None,
) -> dict[str, Model]:
    """The model at `path` under its name, its base under its own where `path` is an adapter or a run, and `adapters`
    (paths by name) over the same base, which is in memory once. Adapters that can share a batch, and a single one
    is merged by `merge` (None: where there is memory).

    `options` are those of `find`. Raises UserError as `meshtune.load` does, and for two models of one name.
    """
    source = find(path, **options)
    sources = {name or str(path).rstrip("/"): source}
    if source.adapter is not None:
        plain = dataclasses.replace(source, adapter=None)
        sources[source.base.name] = plain
    for adapter_name, adapter in adapters.items():
        if adapter_name in sources:
            raise UserError(f"two models have the name '{adapter_name}'", where="--adapter", fix="give another name")
        tokenizer_options = {name: options.get(name) for name in ("chat_template", "tokenizer")}
        sources[adapter_name] = find(source.base, adapter, **tokenizer_options)
    loading: dict[str, Any] = {"dtype": dtype, "quantize": quantize, "cache": cache, "mesh": mesh, "job": job}
    return load_variants(sources, rewards=True, share_batch=True, merge=merge, **loading)
