"""A model that continues token ids: prompts of one call, or a scheduler for requests that come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.generate.driver import Driver, announce
from meshtune.generate.pictures import PromptPictures, with_prefix
from meshtune.generate.programs import STEPS
from meshtune.generate.request import Generation, GenerationRequest, Sampling, check_max_tokens, check_prompt
from meshtune.generate.scheduler import Scheduler
from meshtune.generate.weights import BatchCaches, Weights
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec

DEFAULT_TOKENS = 256  # generated at most when nobody says how many


class Engine:
    """A model ready to continue token ids. `stop_ids` end a row and are its last token.

    `params` may be the `Weights` of another engine, which both then share. With `resident` they may be on a CPU twice,
    the second time in the layout that decoding reads fastest (generate.weights). Where they hold several adapters that
    share a batch, requests of this engine select number `adapter` (None: the base only), and its schedulers take
    requests of all. A `driver` orders what threads and processes compute with the model, which they know by its number
    `model`.
    """

    def __init__(
        self,
        params: Tree | Weights,
        spec: ModelSpec,
        compute: Compute,
        stop_ids: frozenset[int] = frozenset(),
        *,
        resident: bool = False,
        adapter: int | None = None,
        driver: Driver | None = None,
        model: int = 0,
    ):
        self.weights = params if isinstance(params, Weights) else Weights(params, spec, compute, resident=resident)
        self.spec, self.compute, self.stop_ids = spec, compute, stop_ids
        self.adapter, self.driver, self.model = adapter, driver, model

    @property
    def params(self) -> Tree:
        """The parameters in use, with this engine's adapter selected for all rows."""
        return self.weights.select(self.adapter)

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, at most: the config's max_position_embeddings."""
        return self.spec.max_length

    def replace_params(self, params: Tree) -> None:
        """Replaces the parameters of this engine, and of all that share its weights, once the current step has ended.

        `params` is the whole tree, adapters in place; where adapters share a batch, the tree of all of them. No
        scheduler uses anything again that the old ones computed: a prompt that was read is read again, and a request
        under way continues its answer after reading its text again, so that tokens before the call are the old
        parameters', and all later ones the new ones'. The caller may do anything with the old arrays from then
        on, such as donating them. In several processes with a driver, process 0 calls this, with arrays that it holds
        in full, and the others follow. Raises UserError for a tree of another structure, shape or dtype; nothing is
        replaced then.
        """
        changes = self.weights.changes(params)
        with self.weights.exclusive(), announce(self.driver, self.model, "replace", changes=changes):
            self.weights.replace(changes)

    @contextlib.contextmanager
    def computing(self, call: str, **arguments: object) -> Iterator[None]:
        """Announces a call that no batch belongs to, and keeps the parameters from being replaced during the block."""
        with self.weights.use(), announce(self.driver, self.model, call, **arguments):
            yield

    def scheduler(self, *, rows: int = 8, queue: int | None = None, interactive: bool = False) -> Scheduler:
        """A queue for requests: `rows` are computed at once and `queue` may wait (None: any number). `interactive`:
        somebody waits for each request's next token."""
        caches, options = self.batch_caches(self.driver), {"queue": queue, "interactive": interactive}
        return Scheduler(self.weights, caches, self.spec, rows=rows, **options)

    def batch_caches(self, driver: Driver | None = None) -> BatchCaches:
        """The caches of a new batch, whose calls a `driver` announces."""
        return BatchCaches(self.weights, self.spec, self.compute, driver, self.model)

    def request(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Iterable[int] | None = None,
        where: str | None = None,
        **fields: Any,
    ) -> GenerationRequest:
        """A request that this model can answer.

        `max_tokens` new tokens at most; None is 256, or what the context still has room for. `fields` are further ones
        of GenerationRequest. `where` names the prompt. Raises UserError for an empty prompt, a token id outside the
        vocabulary, a prompt that ends with a picture, and a prompt and max_tokens that together are longer than the
        context.
        """
        ids = check_prompt(prompt, self.spec.vocab, self.context, where)
        pictures: PromptPictures | None = fields.pop("pictures", None)
        if pictures is not None and pictures.end == len(ids):
            raise UserError("the prompt ends with a picture", where=where, fix="give at least a word after it")
        if max_tokens is None:
            max_tokens = min(DEFAULT_TOKENS, self.context - len(ids))
        max_tokens = check_max_tokens(max_tokens, len(ids), self.context)
        stops = self.stop_ids if stop_ids is None else frozenset(stop_ids)
        if self.spec.vision is not None and self.spec.vision.mutual == "prefix":
            pictures = with_prefix(pictures, len(ids))
        fields |= {"pictures": pictures, "adapter": self.adapter}
        return GenerationRequest(ids, max_tokens, sampling or Sampling(), stops, **fields)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Iterable[int] | None = None,
        pictures: Sequence[PromptPictures | None] | None = None,
        steps: int = STEPS,
        rows: int | None = None,
        scheduler: Scheduler | None = None,
    ) -> Run:
        """Starts on prompts of any lengths; iterate over the result for the new tokens.

        Prompt i draws with seed + i and has `pictures[i]`. `steps` tokens a row come at once (1 to 16), and `rows`
        prompts are computed at once (None: all). A `scheduler` of this engine still has what it read before; None is a
        new one. For the rest, and errors, see `request`.
        """
        if not prompts:
            raise UserError("there is no prompt", fix="give at least one")
        sampling = sampling or Sampling()
        requests = [
            self.request(
                prompt,
                sampling.of_row(number),
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                pictures=None if pictures is None else pictures[number],
                where=f"prompt {number}" if len(prompts) > 1 else None,
            )
            for number, prompt in enumerate(prompts)
        ]
        return Run(scheduler or self.scheduler(rows=rows or len(requests)), requests, steps)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Iterable[int] | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt, a stop id included. See `run`."""
        answers: list[list[int]] = [[] for _ in prompts]
        for piece in self.run(prompts, sampling, max_tokens=max_tokens, stop_ids=stop_ids):
            for row, tokens in zip(answers, piece, strict=True):
                row.extend(tokens)
        return answers


class Run:
    """Prompts being continued: iterating yields, piece by piece, each one's new tokens (none where it has ended)."""

    def __init__(self, scheduler: Scheduler, requests: Sequence[GenerationRequest], steps: int):
        self._scheduler, self._steps = scheduler, steps
        self.generations: list[Generation] = [scheduler.submit(request) for request in requests]

    def stop(self, number: int) -> None:
        """Ends a generation, for reasons that only the reader of its text sees."""
        self._scheduler.cancel(self.generations[number])

    def __iter__(self) -> Iterator[list[list[int]]]:
        try:
            while any(generation.finish_reason is None for generation in self.generations):
                new = {id(progress.generation): progress.tokens for progress in self._scheduler.step(self._steps)}
                self._check()
                if new:
                    yield [[token.id for token in new.get(id(generation), [])] for generation in self.generations]
        finally:
            for number in range(len(self.generations)):
                self.stop(number)

    def _check(self) -> None:
        for number, generation in enumerate(self.generations):
            if generation.error is not None:
                where = f"prompt {number}" if len(self.generations) > 1 else None
                raise UserError(generation.error.what, where=where, fix=generation.error.fix)
