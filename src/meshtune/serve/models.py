"""The models that a server offers, each with the thread that computes its answers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from functools import cached_property

import meshtune
from meshtune.errors import UserError
from meshtune.generate.api import Model, load_variants
from meshtune.generate.config import Sampling
from meshtune.generate.prompts import turn_end
from meshtune.runs.sources import find
from meshtune.serve.errors import ApiError
from meshtune.serve.grammar import Grammars
from meshtune.serve.worker import Worker


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A model under the id that clients name."""

    id: str
    model: Model
    worker: Worker
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def fingerprint(self) -> str:
        """What the numbers of an answer depend on beside the request."""
        return f"meshtune-{meshtune.__version__}-{self.model.compute.dtype}"

    @cached_property
    def chat_stops(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """(token ids, strings) that end an answer in a conversation. Raises UserError for a model that cannot chat."""
        ids, strings = turn_end(self.model.tokenizer)
        return self.model.stop_ids | ids, strings

    @cached_property
    def chat_grammars(self) -> Grammars:
        """Compiles what answers in conversations must be like."""
        return Grammars(self.model.tokenizer, self.model.spec.vocab, self.chat_stops[0])

    def token_text(self, id_: int) -> str:
        """A token by itself, special tokens included."""
        return self.model.tokenizer.decode([id_], skip_special_tokens=False)  # pyright: ignore[reportReturnType]


class Models:
    """All models of a server. `rows` requests of each are computed at once, and `queue` may wait."""

    def __init__(self, models: dict[str, Model], *, rows: int, queue: int):
        self._served = {
            name: Served(name, model, Worker(model.engine.scheduler(rows=rows, queue=queue), name))
            for name, model in models.items()
        }

    def __iter__(self):
        return iter(self._served.values())

    def warm_up(self) -> None:
        """Compiles what a first request needs, before the workers start. Raises what keeps a model from answering."""
        for served in self:
            if served.model.spec.scored:
                continue
            scheduler, engine = served.worker.scheduler, served.model.engine
            scheduler.submit(engine.request([0], Sampling(temperature=1.0), max_tokens=2))
            while not scheduler.idle:
                scheduler.step()

    def __getitem__(self, name: str) -> Served:
        """The model of this id. Raises ApiError (404)."""
        if name not in self._served:
            known = ", ".join(self._served)
            raise ApiError(
                404, f"the model '{name}' does not exist; there are: {known}", param="model", code="model_not_found"
            )
        return self._served[name]

    def writer(self, name: str) -> Served:
        """The model of this id, to write texts. Raises ApiError (404, and 400 for a reward model)."""
        served = self[name]
        if served.model.spec.scored:
            raise ApiError(400, f"'{name}' is a reward model: it scores texts (/v1/score/evaluation)", param="model")
        return served

    @property
    def first(self) -> Served:
        """The model that is meant where none is named."""
        return next(iter(self))


def load_served(
    path: str, name: str | None, adapters: Mapping[str, str], *, dtype: str | None, quantize: str, **options: str | None
) -> dict[str, Model]:
    """The model at `path` under its name, its base under its own where `path` is an adapter or a run, and `adapters`
    (paths by name) over the same base, which is in memory once.

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
        sources[adapter_name] = find(source.base, adapter, chat_template=options.get("chat_template"))
    return load_variants(sources, dtype=dtype, quantize=quantize, rewards=True)
