"""Requests to an engine and their answers, in token ids: how the next token is chosen, which the command line and the
Python API read too, and the grammars that answers may have to follow."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from meshtune.errors import UserError
from meshtune.options import option

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import UInt32

    from meshtune.generate.pictures import PromptPictures

WORD = 32  # tokens whose bits are in one word of a mask


class Constraint(Protocol):
    """How far one answer has come in a grammar. It is advanced token by token, in the order of the answer."""

    def mask(self) -> UInt32[np.ndarray, "V/32"]:
        """The tokens that may follow: bit i % 32 of word i // 32 is set where token i may."""
        ...

    def accept(self, token: int) -> None:
        """Advances by a token that the mask allowed. Raises UserError where the grammar can be followed no further."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the grammar is satisfied and allows nothing more."""
        ...


class Grammar(Protocol):
    """A grammar that answers must follow. Several answers may follow it at once."""

    def start(self) -> Constraint:
        """The constraint of an answer that has no token yet."""
        ...


def mask_words(vocab: int) -> int:
    """Words of a mask over `vocab` tokens."""
    return -(-vocab // WORD)


# The least and the greatest value of each number; a whole one where the greatest is.
RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "0 (greedy) to 100, often 0.7 to 1"),
    "top_k": (0, 2**31 - 1, "0 (off) or a whole number below 2147483648, often 50"),
    "top_p": (math.ulp(0.0), 1.0, "above 0 and at most 1 (off), often 0.95"),
    "min_p": (0.0, 1.0, "0 (off) to 1, often 0.05"),
    "repetition_penalty": (0.01, 100.0, "0.01 to 100; 1 is off"),
    "presence_penalty": (-2.0, 2.0, "-2 to 2; 0 is off"),
    "frequency_penalty": (-2.0, 2.0, "-2 to 2; 0 is off"),
    "seed": (0, 2**31 - 1, "a whole number from 0 to 2147483647"),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The default is greedy decoding.

    `repetition_penalty` counts the prompt too; `presence_penalty` and `frequency_penalty` (OpenAI's) count generated
    tokens only. Penalties and `logit_bias`, (token id, addition to its logit) pairs, also apply to greedy
    decoding; `top_k`, `top_p` and `min_p` only where temperature is above 0. Of several prompts, prompt i draws with
    seed + i, as in a call without the others.
    Raises UserError for a value out of its range.
    """

    temperature: float = option(0.0, "0 takes the likeliest token.", flags=("--temperature", "-t"))
    top_k: int = option(0, "Only the k likeliest tokens; 0 is off.")
    top_p: float = option(1.0, "Only the likeliest tokens up to this probability; 1 is off.")
    min_p: float = option(0.0, "Only tokens this likely, relative to the likeliest; 0 is off.")
    repetition_penalty: float = option(1.0, "Above 1 repeats less; 1 is off.")
    seed: int = option(0, "The same seed gives the same text.")
    presence_penalty: float = option(0.0, "Taken from the logit of every token that was generated; 0 is off.")
    frequency_penalty: float = option(0.0, "Taken from a token's logit each time it was generated; 0 is off.")
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self):
        for name, (least, greatest, valid) in RANGES.items():
            value = getattr(self, name)
            is_kind = isinstance(greatest, float) or _is_int(value)
            _check(name, value, is_kind and least <= value <= greatest, valid)
        for token, bias in self.logit_bias:
            in_range = _is_int(token) and token >= 0 and -100 <= bias <= 100
            _check("logit_bias", bias, in_range, "token ids with -100 to 100")

    def of_row(self, row: int) -> Sampling:
        """How prompt number `row` of several is sampled: the same with another seed."""
        return dataclasses.replace(self, seed=(self.seed + row) % 2**31)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: float, in_range: bool, valid: str) -> None:
    if not in_range:
        raise UserError(f"{name} = {value!r:.40} is out of range", where=f"sampling, {name}", fix=f"give {valid}")


FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue. `stop_ids` end it and are its last token.

    `max_tokens` may be generated at most. `alternatives` is the number of likeliest tokens to report with every one
    with their log-probabilities (0: only that of the token; None: none). `client` is who asks: rows are given to
    clients in turn. `grammar` is the one that the answer must follow: it ends with a stop id once the grammar is
    satisfied, or by itself where nothing more may follow. `adapter` is the number of the adapter that it selects where
    several share a batch (None: the base only). With `reports_drawn`, which all requests of a scheduler must agree on,
    log-probabilities are those of the distribution that the token was drawn from, after temperature and cuts.
    `pictures` are those of the prompt, whose ids have placeholders in their places.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    alternatives: int | None = None
    client: str = ""
    grammar: Grammar | None = None
    adapter: int | None = None
    reports_drawn: bool = False
    pictures: PromptPictures | None = None

    def with_seed_of(self, row: int) -> GenerationRequest:
        """The same request as number `row` of several, which draws with another seed."""
        return dataclasses.replace(self, sampling=self.sampling.of_row(row))

    @functools.cached_property
    def keys(self) -> tuple[int, ...]:
        """The prompt by what caches know its tokens by: their ids, or negative numbers where pictures are."""
        return self.prompt if self.pictures is None else tuple(self.pictures.keys(self.prompt))


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

    def start(self, grammar: Grammar) -> None:
        """Begins to follow the request's grammar; ends with an error where it allows nothing."""
        try:
            self.constraint = grammar.start()
        except UserError as problem:
            self.error, self.finish_reason = problem, "error"

    def extend(self, tokens: Sequence[Token]) -> FinishReason | None:
        """Appends new tokens, and returns why the generation ends with them (None: it does not)."""
        self.tokens += tokens
        if tokens[-1].id in self.request.stop_ids:
            return "stop"
        reason = None if self.constraint is None else self._follow(self.constraint, tokens)
        return reason or ("length" if len(self.tokens) >= self.request.max_tokens else None)

    def _follow(self, constraint: Constraint, tokens: Sequence[Token]) -> FinishReason | None:
        try:
            for token in tokens:
                constraint.accept(token.id)
        except UserError as problem:
            self.error = problem
            return "error"
        return "stop" if constraint.finished else None

    @property
    def ids(self) -> list[int]:
        """The ids of the tokens so far."""
        return [token.id for token in self.tokens]

    @property
    def text(self) -> list[int]:
        """The prompt's keys and the tokens so far."""
        return [*(self.request.keys if self.request.pictures else self.request.prompt), *self.ids]

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
    if not 0 < len(ids) < context or min(ids) < 0 or max(ids) >= vocab:
        raise _prompt_error(ids, vocab, context, where)
    return ids


def _prompt_error(ids: Sequence[int], vocab: int, context: int, where: str | None) -> UserError:
    if not ids:
        return UserError("the prompt is empty", where=where, fix="give at least one token to continue from")
    unknown = next((id_ for id_ in ids if not 0 <= id_ < vocab), None)
    if unknown is not None:
        problem = f"token id {unknown:d} is outside the model's vocabulary of {vocab}"
        return UserError(problem, where=where, fix="use the tokenizer that belongs to the model")
    problem = f"the prompt's {len(ids)} tokens leave no room in the model's context of {context} tokens"
    return UserError(problem, where=where, fix="shorten the prompt")


def check_max_tokens(max_tokens: int, prompt: int, context: int) -> int:
    """`max_tokens`. Raises UserError where it is not positive, or more than a prompt leaves room for."""
    if not 0 < max_tokens <= context - prompt:
        raise _max_tokens_error(max_tokens, prompt, context)
    return max_tokens


def _max_tokens_error(max_tokens: int, prompt: int, context: int) -> UserError:
    if max_tokens < 1:
        return UserError(f"max_tokens = {max_tokens} generates nothing", fix="give 1 or more")
    return UserError(
        f"a prompt of {prompt} tokens and max_tokens = {max_tokens} are more than the model's context of {context} "
        "tokens",
        fix=f"give max_tokens = {context - prompt} at most, or shorten the prompt",
    )


class QueueFull(UserError):
    """More requests wait than the queue may hold."""


class Progress(NamedTuple):
    """The new tokens of a generation in one step, and why it ended with them (None: it has not)."""

    generation: Generation
    tokens: list[Token]
    finish_reason: FinishReason | None
