"""`/v1/completions`: texts continued, with the log-probabilities that evaluation harnesses read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshtune.generate.prompts import continuation_ids
from meshtune.generate.request import GenerationRequest, Token, check_prompt
from meshtune.generate.text import Alignment, Detokenizer, Place, check_stops
from meshtune.serve.answer import Piece, PlacedToken, Question
from meshtune.serve.models import Served
from meshtune.serve.schema import CompletionRequest

NAME, CHUNK_NAME, PREFIX = "text_completion", "text_completion", "cmpl"
DEFAULT_TOKENS = 16  # as OpenAI's


class CompletionAnswers:
    """The answers to one request, as `choices` of a whole response or of a stream."""

    def __init__(self, request: CompletionRequest, served: Served):
        self._request, self._served = request, served
        self._scored: dict[tuple[int, ...], list[Token]] = {}

    @property
    def scores(self) -> bool:
        """Whether prompts are scored."""
        return self._request.echo and self._request.logprobs is not None

    def questions(self, client: str, seed: int) -> list[Question]:
        """Every prompt, `n` times over, each drawn with a seed of its own. Raises ApiError and UserError."""
        request, model, questions = self._request, self._served.model, []
        sampling, stops = request.sampling(seed, model.spec.vocab), check_stops(request.stops)
        for number, prompt in enumerate(request.prompt):
            where = f"prompt[{number}]" if len(request.prompt) > 1 else "prompt"
            first = self._asked(prompt, where, client)
            for copy in range(request.n):
                index = number * request.n + copy
                copied = dataclasses.replace(first, sampling=sampling.of_row(copy))
                questions.append(Question(index, copied, stops, continued=True))
        return questions

    def _asked(self, prompt: str | list[int], where: str, client: str) -> GenerationRequest:
        request, model = self._request, self._served.model
        if isinstance(prompt, str):
            self._served.check_text(prompt, where)
            prompt = continuation_ids(model.tokenizer, prompt)
        options: dict[str, Any] = {"alternatives": request.logprobs, "client": client}
        if request.max_tokens == 0:
            ids = check_prompt(prompt, model.spec.vocab, model.engine.context + 1, where)
            return dataclasses.replace(model.engine.request(ids[:1], max_tokens=1, **options), prompt=ids, max_tokens=0)
        tokens = request.max_tokens or min(DEFAULT_TOKENS, max(1, model.engine.context - len(prompt)))
        return model.engine.request(prompt, max_tokens=tokens, stop_ids=model.stop_ids, where=where, **options)

    def choice(self, question: Question, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A whole answer, after its prompt where that is to be echoed."""
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        if self._request.echo:
            before, scored = self._echo(question.request.prompt)
            text = before + text
            tokens = scored + [
                PlacedToken(token, place._replace(offset=place.offset + len(before))) for token, place in tokens
            ]
        return {
            "index": question.choice,
            "text": text,
            "logprobs": None if self._request.logprobs is None else _log_probabilities(self._served, tokens),
            "finish_reason": pieces[-1].finish_reason,
        }

    def _echo(self, prompt: tuple[int, ...]) -> tuple[str, list[PlacedToken]]:
        """The text of a prompt, and its tokens where log-probabilities are asked for."""
        served, decoder = self._served, Detokenizer(self._served.model.tokenizer)
        if self._request.logprobs is None:
            return decoder.push(prompt) + decoder.finish(), []
        if prompt not in self._scored:
            scored = served.model.token_log_probabilities(list(prompt), self._request.logprobs)
            self._scored[prompt] = [Token(prompt[0]), *scored]
        alignment = Alignment(decoder, served.token_bytes, served.special_ids, continued=False)
        parts = [*(alignment.push(id_) for id_ in prompt), alignment.finish()]
        places: list[Place] = [place for _, several in parts for place in several]
        return "".join(text for text, _ in parts), list(map(PlacedToken, self._scored[prompt], places))

    def openings(self) -> list[dict[str, Any]]:
        """What the stream of every choice begins with: nothing."""
        return []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a streamed answer."""
        probabilities = None if self._request.logprobs is None else _log_probabilities(self._served, piece.tokens)
        end = {"logprobs": probabilities, "finish_reason": piece.finish_reason}
        return [{"index": piece.choice, "text": piece.text, **end}]


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
