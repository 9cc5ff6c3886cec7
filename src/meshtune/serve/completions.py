"""`/v1/completions`: texts continued, with the log-probabilities that evaluation harnesses read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshtune.generate.prompts import continuation_ids
from meshtune.generate.request import Token
from meshtune.serve.answer import Piece, Question
from meshtune.serve.errors import ApiError
from meshtune.serve.models import Served
from meshtune.serve.schema import CompletionRequest

NAME, CHUNK_NAME, PREFIX = "text_completion", "text_completion", "cmpl"
DEFAULT_TOKENS = 16  # as OpenAI's


class CompletionAnswers:
    """The answers to one request, as `choices` of a whole response or of a stream."""

    def __init__(self, request: CompletionRequest, served: Served):
        """Raises ApiError for what cannot be had."""
        if request.stream and request.echo:
            raise ApiError(400, "echo cannot be streamed", param="echo")
        self._request, self._served = request, served

    def questions(self, client: str, seed: int) -> list[Question]:
        """Every prompt, `n` times over, each drawn with a seed of its own. Raises ApiError and UserError."""
        return _questions(self._request, self._served, client, seed)

    def choice(self, question: Question, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A whole answer, after its prompt where that is to be echoed."""
        return _choice(self._request, self._served, question, pieces)

    def openings(self) -> list[dict[str, Any]]:
        """What the stream of every choice begins with: nothing."""
        return []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a streamed answer."""
        probabilities = None if self._request.logprobs is None else _log_probabilities(self._served, piece.tokens)
        end = {"logprobs": probabilities, "finish_reason": piece.finish_reason}
        return [{"index": piece.choice, "text": piece.text, **end}]


def _questions(request: CompletionRequest, served: Served, client: str, seed: int) -> list[Question]:
    model, prompts = served.model, []
    for number, prompt in enumerate(request.prompts):
        ids = continuation_ids(model.tokenizer, prompt) if isinstance(prompt, str) else prompt
        for copy in range(request.n):
            index = number * request.n + copy
            engine_request = model.engine.request(
                ids,
                request.sampling(seed, model.spec.vocab).of_row(copy),
                max_tokens=request.max_tokens or min(DEFAULT_TOKENS, max(1, model.engine.context - len(ids))),
                stop_ids=model.stop_ids,
                alternatives=request.logprobs,
                client=client,
                where=f"prompt[{number}]" if len(request.prompts) > 1 else "prompt",
            )
            prompts.append(Question(index, engine_request, request.stops, continued=True))
    return prompts


def _choice(request: CompletionRequest, served: Served, question: Question, pieces: Sequence[Piece]) -> dict[str, Any]:
    text = "".join(piece.text for piece in pieces)
    tokens = [token for piece in pieces for token in piece.tokens]
    if request.echo:
        prompt = list(question.request.prompt)
        text = f"{served.model.tokenizer.decode(prompt, skip_special_tokens=True)}{text}"
        if request.logprobs is not None:
            scored = served.model.token_log_probabilities(prompt, request.logprobs)
            tokens = [Token(prompt[0]), *scored, *tokens]
    return {
        "index": question.choice,
        "text": text,
        "logprobs": None if request.logprobs is None else _log_probabilities(served, tokens),
        "finish_reason": pieces[-1].finish_reason,
    }


def _log_probabilities(served: Served, tokens: Sequence[Token]) -> dict[str, Any]:
    """Lists with an entry for every token; that of a text's first token, which nothing precedes, is null.

    The likeliest tokens have the very numbers of the token itself, so that whoever compares them finds it.
    """
    texts = [served.token_text(token.id) for token in tokens]
    offsets = [sum(map(len, texts[:n])) for n in range(len(texts))]
    likeliest = [
        {served.token_text(id_): value for id_, value in token.likeliest} if token.likeliest else None
        for token in tokens
    ]
    return {
        "tokens": texts,
        "token_logprobs": [token.log_probability for token in tokens],
        "top_logprobs": likeliest,
        "text_offset": offsets,
    }
