"""A model that continues token ids: prompts of one call, or a scheduler for requests that come and go."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.generate.batch_caches import BatchCaches
from meshtune.generate.config import Sampling
from meshtune.generate.constraint import Grammar
from meshtune.generate.decode_layout import decode_layout, decodes_from_copy
from meshtune.generate.driver import Driver, in_turn
from meshtune.generate.programs import STEPS, head_scale
from meshtune.generate.request import Generation, Request, check_max_tokens, check_prompt
from meshtune.generate.scheduler import Scheduler
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec

DEFAULT_TOKENS = 256  # generated at most when nobody says how many


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model ready to continue token ids. `stop_ids` end a row and are its last token.

    With `resident` it may hold large weights twice on a CPU, the second time as decoding reads them fastest
    (generate.decode_layout); for parameters that do not change. Where `params` are those of several adapters that
    share a batch (adapters.multi_lora), its requests select `adapter`, and its schedulers take requests of all of them.
    A `driver` orders what threads and processes compute that share the model, number `model` of theirs.
    """

    params: Tree
    spec: ModelSpec
    compute: Compute
    stop_ids: frozenset[int] = frozenset()
    resident: bool = False
    adapter: int | None = None
    driver: Driver | None = None
    model: int = 0

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, at most: the config's max_position_embeddings."""
        return self.spec.max_length

    def scheduler(self, *, rows: int = 8, queue: int | None = None) -> Scheduler:
        """A queue for requests, of which `rows` are computed at once and `queue` may wait (None: any number)."""
        with in_turn(self.driver, self.model, "settle"):
            self.settle()
        options = {"decode_params": self._decode_params, "driver": self.driver, "model": self.model}
        return Scheduler(self._settled, self.spec, self.compute, rows=rows, queue=queue, **options)

    def settle(self) -> None:
        """Computes what schedulers read beside the parameters, once."""
        assert self._settled is not None
        assert self._decode_params is not None

    def batch_caches(self) -> BatchCaches:
        """The caches of a new batch, as a process has them that follows another one's scheduler."""
        return BatchCaches(self._settled, self.spec, self.compute, self._decode_params)

    def request(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Iterable[int] | None = None,
        alternatives: int | None = None,
        client: str = "",
        grammar: Grammar | None = None,
        where: str | None = None,
    ) -> Request:
        """A request that this model can answer.

        `max_tokens` new tokens at most; None is 256, or what the context still has room for. Raises UserError for an
        empty prompt, a token id outside the vocabulary, and a prompt and max_tokens that together are longer than the
        context; `where` names the prompt.
        """
        ids = check_prompt(prompt, self.spec.vocab, self.context, where)
        if max_tokens is None:
            max_tokens = min(DEFAULT_TOKENS, self.context - len(ids))
        max_tokens = check_max_tokens(max_tokens, len(ids), self.context)
        stops = self.stop_ids if stop_ids is None else frozenset(stop_ids)
        return Request(ids, max_tokens, sampling or Sampling(), stops, alternatives, client, grammar, self.adapter)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Iterable[int] | None = None,
        steps: int = STEPS,
        rows: int | None = None,
        scheduler: Scheduler | None = None,
    ) -> Run:
        """Starts on prompts of any lengths; iterate over the result for the new tokens.

        Prompt i draws with seed + i. `steps` tokens a row come at once (1 to 16), and `rows` prompts are computed at
        once (None: all). A `scheduler` of this engine still has what it read before; None is a new one. For the rest,
        and errors, see `request`.
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

    @cached_property
    def _settled(self) -> Tree:
        """The parameters, with what the rows of a normalised head are divided by, once for all tokens to come."""
        if not self.spec.norm_head or self.spec.scored:
            return self.params
        scale = head_scale(self.params["head"], spec=self.spec)
        return self.params | {"head": self.params["head"] | {"scale": scale}}

    @cached_property
    def _decode_params(self) -> Tree:
        """The parameters that decode steps read."""
        params = self._settled
        return decode_layout(params, self.spec) if self.resident and decodes_from_copy(params, self.compute) else params


class Run:
    """Prompts being continued: iterating yields, piece by piece, each one's new tokens (none where it has ended)."""

    def __init__(self, scheduler: Scheduler, requests: Sequence[Request], steps: int):
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
