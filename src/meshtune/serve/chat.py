"""`/v1/chat/completions`: conversations answered by the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshtune.generate.prompts import chat_ids, turn_end
from meshtune.generate.request import Token
from meshtune.serve.answer import Piece, Question
from meshtune.serve.models import Served
from meshtune.serve.schema import ChatRequest

NAME, CHUNK_NAME, PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl"


def questions(request: ChatRequest, served: Served, client: str, seed: int) -> list[Question]:
    """The same conversation for every choice, each drawn with a seed of its own. Raises ApiError and UserError."""
    request.check()
    model = served.model
    messages = [message.rendered(f"messages[{n}]") for n, message in enumerate(request.messages)]
    ids = chat_ids(model.tokenizer, messages)
    turn_ids, turn_strings = turn_end(model.tokenizer)
    most = request.max_completion_tokens or request.max_tokens or max(1, model.engine.context - len(ids))
    return [
        Question(
            choice,
            model.engine.request(
                ids,
                request.sampling(seed, model.spec.vocab).of_row(choice),
                max_tokens=most,
                stop_ids=model.stop_ids | turn_ids,
                alternatives=request.alternatives,
                client=client,
            ),
            (*request.stops, *turn_strings),
            continued=False,
        )
        for choice in range(request.n)
    ]


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
