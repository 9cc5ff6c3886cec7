"""What the devices hold of a batch of rows: its caches and token counts, changed by the compiled programs.

Everything else that a step needs comes from the host as small arguments, so that several processes which are told the
same arguments in the same order run the same programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from meshtune.arrays.tree import Tree
from meshtune.generate import programs
from meshtune.generate.driver import Driver
from meshtune.generate.long_context import by_long_factors
from meshtune.generate.programs import Decoded, Feed
from meshtune.generate.sampling import Counts, Knobs, Switches
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec

Numbers = Int[np.ndarray, "n"]


class BatchCaches:
    """The caches of the rows of one batch, and what its programs read.

    `decode_params` are the same parameters as decode steps are to read them. With a `driver` every call is announced to
    the other processes that share this model, number `model` of theirs.
    """

    def __init__(
        self,
        params: Tree,
        spec: ModelSpec,
        compute: Compute,
        decode_params: Tree | None = None,
        driver: Driver | None = None,
        model: int = 0,
    ):
        self._params, self._decode_params = params, params if decode_params is None else decode_params
        self._spec, self._compute = spec, compute
        self._announce = None if driver is None else driver.new_batch(self, model)
        self.layers: dict[str, Tree] = {}
        self.counts: Counts | None = None

    def create(self, rows: int, slots: int) -> None:
        """Empty caches of `rows` rows of `slots` tokens."""
        with self._announced("create", rows=rows, slots=slots):
            self.layers = programs.empty_layers(self._spec, self._compute, rows, slots)

    def move(self, source: Numbers, slots: int) -> None:
        """The caches of `source`'s rows alone, in its order, with room for `slots` tokens."""
        with self._announced("move", source=source, slots=slots):
            self.layers = programs.moved(self.layers, source, spec=self._spec, compute=self._compute, slots=slots)

    def read_new(
        self, tokens: np.ndarray, count: Numbers, target: Numbers, adapters: np.ndarray | None, long: bool = False
    ) -> None:
        """See programs.read_new; `long`: the texts are longer than the original context (generate.long_context)."""
        with self._announced("read_new", tokens=tokens, count=count, target=target, adapters=adapters, long=long):
            self.layers = programs.read_new(
                self._params, self.layers, tokens, count, target, adapters=adapters, **self._reading(long)
            )

    def read_on(
        self,
        tokens: np.ndarray,
        count: Numbers,
        source: Numbers,
        length: Numbers,
        target: Numbers,
        adapters: np.ndarray | None,
        long: bool = False,
    ) -> None:
        """See programs.read_on, and read_new for `long`."""
        arguments: dict[str, Any] = {"tokens": tokens, "count": count, "source": source, "length": length}
        with self._announced("read_on", **arguments, target=target, adapters=adapters, long=long):
            arrays = (tokens, count, source, length, target)
            self.layers = programs.read_on(self._params, self.layers, *arrays, adapters=adapters, **self._reading(long))

    def count(self, prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], vocab: int) -> None:
        """Counts all rows' tokens anew, those of prompts and those generated since; with a `vocab` of 0 nothing."""
        with self._announced("count", prompts=prompts, generated=generated, vocab=vocab):
            in_prompt = np.zeros((len(prompts), vocab), bool)
            times = np.zeros((len(prompts), vocab), np.int32)
            if vocab:
                for row, (prompt, ids) in enumerate(zip(prompts, generated, strict=True)):
                    in_prompt[row, list(prompt)] = True
                    np.add.at(times[row], list(ids), 1)
            prompted: Any = in_prompt
            since: Any = times
            self.counts = Counts(prompted, since)

    def decode(
        self,
        feed: Feed,
        knobs: Knobs,
        steps: int,
        leave: bool,
        switches: Switches,
        alternatives: int | None,
        adapters: Float[np.ndarray, "B N"] | None,
    ) -> Decoded:
        """See programs.decode; `count` comes first."""
        assert self.counts is not None
        arguments: dict[str, Any] = {"feed": feed, "knobs": knobs, "steps": steps, "leave": leave}
        with self._announced("decode", **arguments, switches=switches, alternatives=alternatives, adapters=adapters):
            self.layers, self.counts, decoded = programs.decode(
                self._decode_params,
                self.layers,
                self.counts,
                feed,
                knobs,
                np.int32(steps),
                np.bool_(leave),
                switches=switches,
                alternatives=alternatives,
                adapters=adapters,
                **self._static,
            )
        return decoded

    @property
    def _static(self) -> dict[str, Any]:
        return {"spec": self._spec, "compute": self._compute}

    def _reading(self, long: bool) -> dict[str, Any]:
        return self._static | ({"spec": by_long_factors(self._spec)} if long else {})

    @contextlib.contextmanager
    def _announced(self, call: str, **arguments: object) -> Iterator[None]:
        with contextlib.nullcontext() if self._announce is None else self._announce(call, arguments):
            yield
            if jax.process_count() > 1 and jax.default_backend() == "cpu":
                jax.block_until_ready(self.layers)  # JAX's Gloo mixes up the messages of two programs at once
