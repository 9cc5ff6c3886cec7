"""`/v1/completions`: texts continued, with the log-probabilities that evaluation harnesses read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshtune.generate.request import GenerationRequest, Token, check_prompt
from meshtune.generate.text import Alignment, Detokenizer, Place, continuation_ids
from meshtune.serve.models import ChoiceDelta, ChoiceRequest, PlacedToken, Served
from meshtune.serve.schema import CompletionRequest

DEFAULT_TOKENS = 16  # as OpenAI's


@dataclasses.dataclass(frozen=True)
class TextCompletion:
    """A completion of texts: the choices that the engine is asked for, and how they are written in a response or a
    stream."""

    request: CompletionRequest
    served: Served
    choices: Sequence[ChoiceRequest]
    prompts: dict[tuple[int, ...], list[Token]] = dataclasses.field(default_factory=dict)  # with log-probabilities

    @property
    def head(self) -> dict[str, Any]:
        """The fields of a response or a chunk, but its choices."""
        return self.served.response_head("cmpl", "text_completion")

    @property
    def scores_prompt(self) -> bool:
        """Whether prompts' log-probabilities are asked for."""
        return self.request.prompt_logprobs is not None or (self.request.echo and self.request.logprobs is not None)

    def choice(self, request: ChoiceRequest, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """A choice of a whole response, after its prompt where that is to be echoed."""
        text = "".join(delta.text for delta in deltas)
        tokens = [token for delta in deltas for token in delta.tokens]
        if self.request.echo:
            before, prompt_tokens = self._echo(request.request.prompt)
            text = before + text
            tokens = prompt_tokens + [
                PlacedToken(token, place._replace(offset=place.offset + len(before))) for token, place in tokens
            ]
        choice = self._choice(request.index, text, tokens, deltas[-1].finish_reason)
        if self.request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_log_probabilities(request.request.prompt)
        return choice

    def first_chunks(self) -> list[dict[str, Any]]:
        """Nothing comes before the text of a stream."""
        return []

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The choices of a stream's chunks for new text."""
        return [self._choice(delta.index, delta.text, delta.tokens, delta.finish_reason)]

    def _choice(
        self, index: int, text: str, tokens: Sequence[PlacedToken], finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if self.request.logprobs is None else _log_probabilities(self.served, tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _echo(self, prompt: tuple[int, ...]) -> tuple[str, list[PlacedToken]]:
        """The text of a prompt, and its tokens where log-probabilities are requested."""
        served, decoder = self.served, Detokenizer(self.served.model.tokenizer)
        if self.request.logprobs is None:
            return decoder.push(prompt) + decoder.finish(), []
        prompt_tokens = self._prompt_tokens(prompt, self.request.logprobs)
        alignment = Alignment(decoder, served.token_bytes, served.special_ids, continued=False)
        parts = [*(alignment.push(id_) for id_ in prompt), alignment.finish()]
        places: list[Place] = [place for _, several in parts for place in several]
        return "".join(text for text, _ in parts), list(map(PlacedToken, prompt_tokens, places))

    def _prompt_tokens(self, prompt: tuple[int, ...], alternatives: int) -> list[Token]:
        """The tokens of a prompt, all but the first with log-probabilities, which are computed once for all choices."""
        if prompt not in self.prompts:
            most = max(alternatives, self.request.prompt_logprobs or 0, self.request.logprobs or 0)
            tokens = self.served.model.token_log_probabilities(list(prompt), most)
            self.prompts[prompt] = [Token(prompt[0]), *tokens]
        return [dataclasses.replace(token, likeliest=token.likeliest[:alternatives]) for token in self.prompts[prompt]]

    def _prompt_log_probabilities(self, prompt: tuple[int, ...]) -> list[dict[str, dict[str, Any]] | None]:
        """As vLLM has them: by id, for every token after the first the likeliest ones in its place, and itself."""
        assert self.request.prompt_logprobs is not None
        tokenizer = self.served.model.tokenizer
        entries: list[dict[str, dict[str, Any]] | None] = [None]
        for token in self._prompt_tokens(prompt, self.request.prompt_logprobs)[1:]:
            ranked: dict[int, tuple[float | None, int | None]] = {
                id_: (value, rank) for rank, (id_, value) in enumerate(token.likeliest, start=1)
            }
            ranked.setdefault(token.id, (token.log_probability, None))
            entries.append(
                {
                    str(id_): {"logprob": value, "rank": rank, "decoded_token": tokenizer.decode([id_])}
                    for id_, (value, rank) in ranked.items()
                }
            )
        return entries


def prepare_completion(request: CompletionRequest, served: Served, client: str, seed: int) -> TextCompletion:
    """Every prompt of a request, `n` times, each drawn with another seed. Raises ApiError and UserError."""
    sampling, stops = request.sampling(seed, served.model.spec.vocab), request.stops
    choices = []
    for number, prompt in enumerate(request.prompt):
        where = f"prompt[{number}]" if len(request.prompt) > 1 else "prompt"
        first = dataclasses.replace(_engine_request(request, served, prompt, where, client), sampling=sampling)
        for n in range(request.n):
            choices.append(ChoiceRequest(number * request.n + n, first.with_seed_of(n), stops, continued=True))
    return TextCompletion(request, served, choices)


def _engine_request(
    request: CompletionRequest, served: Served, prompt: str | list[int], where: str, client: str
) -> GenerationRequest:
    model = served.model
    if isinstance(prompt, str):
        served.check_text(prompt, where)
        prompt = continuation_ids(model.tokenizer, prompt)
    options: dict[str, Any] = {"alternatives": request.logprobs, "client": client}
    if request.max_tokens == 0:
        ids = check_prompt(prompt, model.spec.vocab, model.engine.context + 1, where)
        return dataclasses.replace(model.engine.request(ids[:1], max_tokens=1, **options), prompt=ids, max_tokens=0)
    tokens = request.max_tokens or min(DEFAULT_TOKENS, max(1, model.engine.context - len(prompt)))
    return model.engine.request(prompt, max_tokens=tokens, stop_ids=model.stop_ids, where=where, **options)


def _log_probabilities(served: Served, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
    """Lists with an entry for every token; that of a text's first token, which nothing precedes, is null.

    The likeliest tokens have the very numbers of the token itself, so that whoever compares them finds it. A part of a
    character is named by its bytes, as OpenAI does. Of tokens that read alike the less likely are named by their ids,
    as vLLM does where it is asked to.
    """

    def likeliest(token: Token, place: Place) -> dict[str, float] | None:
        values: dict[str, float] = {}
        for id_, value in token.likeliest:
            text = served.token_text(id_, served.alternative(id_, place), "bytes:")
            values[f"token_id:{id_}" if text in values else text] = value
        return values or None

    return {
        "tokens": [served.token_text(token.id, place.content, "bytes:") for token, place in tokens],
        "token_logprobs": [token.log_probability for token, _ in tokens],
        "top_logprobs": [likeliest(token, place) for token, place in tokens],
        "text_offset": [place.offset for _, place in tokens],
    }
