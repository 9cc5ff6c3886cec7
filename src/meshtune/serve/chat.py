"""`/v1/chat/completions`: conversations answered by the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshtune.generate.prompts import chat_ids
from meshtune.generate.request import Token
from meshtune.serve.answer import Piece, Question
from meshtune.serve.grammar import LLGrammar
from meshtune.serve.models import Served
from meshtune.serve.schema import ChatRequest

NAME, CHUNK_NAME, PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl"


def questions(request: ChatRequest, served: Served, client: str, seed: int) -> list[Question]:
    """The same conversation for every choice, each drawn with a seed of its own. Raises ApiError and UserError."""
    request.check()
    model = served.model
    messages = [message.rendered(f"messages[{n}]") for n, message in enumerate(request.messages)]
    ids = chat_ids(model.tokenizer, messages)
    stop_ids, turn_strings = served.chat_stops
    grammar = _grammar(request, served)
    most = request.max_completion_tokens or request.max_tokens or max(1, model.engine.context - len(ids))
    return [
        Question(
            choice,
            model.engine.request(
                ids,
                request.sampling(seed, model.spec.vocab).of_row(choice),
                max_tokens=most,
                stop_ids=stop_ids,
                alternatives=request.alternatives,
                client=client,
                grammar=grammar,
            ),
            (*request.stops, *turn_strings),
            continued=False,
        )
        for choice in range(request.n)
    ]


def _grammar(request: ChatRequest, served: Served) -> LLGrammar | None:
    form = request.response_format
    if form is None or (schema := form.schema_of_answer) is None:
        return None
    return served.chat_grammars.json(schema, "response_format")


def choice(request: ChatRequest, served: Served, pieces: Sequence[Piece]) -> dict[str, Any]:
    """A whole answer."""
    tokens = [token for piece in pieces for token in piece.tokens]
    return {
        "index": pieces[0].choice,
        "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
        "logprobs": _log_probabilities(served, tokens) if request.logprobs else None,
        "finish_reason": pieces[-1].finish_reason,
    }


def opening(index: int) -> dict[str, Any]:
    """What the stream of a choice begins with."""
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def chunks(request: ChatRequest, served: Served, piece: Piece) -> list[dict[str, Any]]:
    """A piece of a streamed answer."""
    several = []
    if piece.text or piece.tokens:
        probabilities = _log_probabilities(served, piece.tokens) if request.logprobs else None
        several.append({"delta": {"content": piece.text}, "logprobs": probabilities, "finish_reason": None})
    if piece.finish_reason is not None:
        several.append({"delta": {}, "logprobs": None, "finish_reason": piece.finish_reason})
    return [{"index": piece.choice, **chunk} for chunk in several]


def _log_probabilities(served: Served, tokens: Sequence[Token]) -> dict[str, Any]:
    def entry(id_: int, probability: float | None) -> dict[str, Any]:
        text = served.token_text(id_)
        return {"token": text, "logprob": probability, "bytes": list(text.encode())}

    content = [
        entry(token.id, token.log_probability) | {"top_logprobs": [entry(*other) for other in token.likeliest]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}
