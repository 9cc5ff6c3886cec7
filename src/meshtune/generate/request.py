"""Requests to an engine and their answers, in token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from meshtune.errors import UserError
from meshtune.generate.config import Sampling
from meshtune.generate.constraint import Constraint, Grammar

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue. `stop_ids` end it and are its last token.

    `max_tokens` may be generated at most. `alternatives` is the number of likeliest tokens to report with every one
    with their log-probabilities (0: only that of the token; None: none). `client` is who asks: rows are given to
    clients in turn. `grammar` is the one that the answer must follow: it ends with a stop id once the grammar is
    satisfied, or by itself where nothing more may follow. `adapter` is the number of the adapter that it selects where
    several share a batch (None: the base only). `content_keys` has a digest for each position whose token stands for
    something else, such as the first token of a picture: the cache of another request is reused up to a position where
    they differ.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    alternatives: int | None = None
    client: str = ""
    grammar: Grammar | None = None
    adapter: int | None = None
    content_keys: Mapping[int, bytes] = dataclasses.field(default_factory=dict, hash=False)

    def with_seed_of(self, row: int) -> GenerationRequest:
        """The same request as number `row` of several, which draws with another seed."""
        return dataclasses.replace(self, sampling=self.sampling.of_row(row))


@dataclasses.dataclass(frozen=True)
class Token:
    """A token that was generated. The float32 log-probabilities are the model's own, before any processor: of this
    token, and of the likeliest ones as (token id, log-probability), where they were asked for."""

    id: int
    log_probability: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(eq=False)
class Generation:
    """A request under way: its tokens so far, and why it ended (None: it has not). Only the scheduler changes it."""

    request: GenerationRequest
    tokens: list[Token] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: UserError | None = None
    constraint: Constraint | None = None

    def start(self) -> None:
        """Begins to follow the request's grammar. Raises UserError for one that allows nothing."""
        self.constraint = None if self.request.grammar is None else self.request.grammar.start()

    def extend(self, tokens: Sequence[Token]) -> FinishReason | None:
        """Appends new tokens, and returns why the generation ends with them (None: it does not)."""
        self.tokens += tokens
        if tokens[-1].id in self.request.stop_ids:
            return "stop"
        if self.constraint is not None:
            try:
                for token in tokens:
                    self.constraint.accept(token.id)
            except UserError as problem:
                self.error = problem
                return "error"
            if self.constraint.finished:
                return "stop"
        return "length" if len(self.tokens) >= self.request.max_tokens else None

    @property
    def ids(self) -> list[int]:
        """The ids of the tokens so far."""
        return [token.id for token in self.tokens]

    @property
    def text(self) -> list[int]:
        """The prompt and the tokens so far."""
        return [*self.request.prompt, *self.ids]

    @property
    def length(self) -> int:
        """The number of tokens of the text."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def newest(self) -> int:
        """The last token of the text, which the next decode step reads."""
        return self.tokens[-1].id if self.tokens else self.request.prompt[-1]


def check_prompt(prompt: Sequence[int], vocab: int, context: int, where: str | None = None) -> tuple[int, ...]:
    """The ids of a prompt. Raises UserError for an empty or over-long one, and for ids that the model does not have."""
    ids = tuple(map(int, prompt))
    if not ids:
        raise UserError("the prompt is empty", where=where, fix="give at least one token to continue from")
    if min(ids) < 0 or max(ids) >= vocab:
        unknown = next(id_ for id_ in ids if not 0 <= id_ < vocab)
        raise UserError(
            f"token id {unknown:d} is outside the model's vocabulary of {vocab}",
            where=where,
            fix="use the tokenizer that belongs to the model",
        )
    if len(ids) >= context:
        raise UserError(
            f"the prompt's {len(ids)} tokens leave no room in the model's context of {context} tokens",
            where=where,
            fix="shorten the prompt",
        )
    return ids


def check_max_tokens(max_tokens: int, prompt: int, context: int) -> int:
    """`max_tokens`. Raises UserError where it is not positive, or more than a prompt leaves room for."""
    if max_tokens < 1:
        raise UserError(f"max_tokens = {max_tokens} generates nothing", fix="give 1 or more")
    if max_tokens > context - prompt:
        raise UserError(
            f"a prompt of {prompt} tokens and max_tokens = {max_tokens} are more than the model's context of {context} "
            "tokens",
            fix=f"give max_tokens = {context - prompt} at most, or shorten the prompt",
        )
    return max_tokens
