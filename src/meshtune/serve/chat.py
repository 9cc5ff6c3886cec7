"""`/v1/chat/completions`: conversations answered by the model's chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshtune.generate.text import Place, check_stops
from meshtune.serve.answer import Piece, PlacedToken, Question
from meshtune.serve.conversation import Conversation, prepared
from meshtune.serve.models import Served
from meshtune.serve.responses.call import ToolCall, new_id
from meshtune.serve.responses.reader import Delta
from meshtune.serve.schema import ChatRequest

NAME, CHUNK_NAME, PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl"


class ChatAnswers:
    """The answers to one request, as `choices` of a whole response or of a stream."""

    def __init__(self, request: ChatRequest, served: Served):
        """Renders the conversation. Raises ApiError and UserError for what cannot be answered."""
        self._request, self._served = request, served
        self._conversation: Conversation = prepared(request, served)
        self._readers = [self._conversation.reader() for _ in range(request.n)]
        self._calls = [0] * request.n

    @property
    def scores(self) -> bool:
        """Nothing is scored after an answer."""
        return False

    def questions(self, client: str, seed: int) -> list[Question]:
        """The same conversation for every choice, each drawn with a seed of its own. Raises UserError."""
        request, model, conversation = self._request, self._served.model, self._conversation
        stop_ids, turn_strings = self._served.chat_stops
        room = max(1, model.engine.context - len(conversation.ids))
        grammar = conversation.grammar()
        sampling = request.sampling(seed, model.spec.vocab)
        first = model.engine.request(
            conversation.ids,
            max_tokens=request.max_completion_tokens or request.max_tokens or room,
            stop_ids=stop_ids,
            alternatives=request.alternatives,
            client=client,
            grammar=grammar,
        )
        stops = check_stops((*request.stops, *turn_strings))
        return [
            Question(
                choice,
                dataclasses.replace(first, sampling=sampling.of_row(choice)),
                stops,
                continued=False,
                visible=conversation.visible,
            )
            for choice in range(request.n)
        ]

    def choice(self, question: Question, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A whole answer."""
        tokens = [token for piece in pieces for token in piece.tokens]
        deltas = [delta for piece in pieces for delta in self._read(piece)]
        calls = [self._written(delta.call) for delta in deltas if delta.call is not None]
        content = "".join(delta.content for delta in deltas)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(delta.reasoning for delta in deltas):
            message["reasoning_content"] = reasoning
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": question.choice,
            "message": message,
            "logprobs": _log_probabilities(self._served, tokens) if self._request.logprobs else None,
            "finish_reason": self._reason(pieces[-1], bool(calls)),
        }

    def openings(self) -> list[dict[str, Any]]:
        """What the stream of every choice begins with."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": n, "delta": delta, "logprobs": None, "finish_reason": None} for n in range(self._request.n)]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a streamed answer."""
        deltas = [change for delta in self._read(piece) for change in self._changes(piece.choice, delta)]
        with_tokens = self._request.logprobs and piece.tokens
        if with_tokens and not deltas:
            deltas = [{"content": ""}]
        several = [{"delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        if with_tokens:
            several[0]["logprobs"] = _log_probabilities(self._served, piece.tokens)
        if piece.finish_reason is not None:
            reason = self._reason(piece, self._calls[piece.choice] > 0)
            several.append({"delta": {}, "logprobs": None, "finish_reason": reason})
        return [{"index": piece.choice, **chunk} for chunk in several]

    def _read(self, piece: Piece) -> list[Delta]:
        reader = self._readers[piece.choice]
        return reader.push(piece.text) + (reader.finish() if piece.finish_reason is not None else [])

    def _changes(self, choice: int, delta: Delta) -> list[dict[str, Any]]:
        if delta.call is None:
            name = "content" if delta.content else "reasoning_content"
            return [{name: delta.content or delta.reasoning}]
        index, self._calls[choice] = self._calls[choice], self._calls[choice] + 1
        call = self._written(delta.call)
        arguments = call["function"].pop("arguments")
        call["function"]["arguments"] = ""
        return [
            {"tool_calls": [{"index": index, **call}]},
            {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]},
        ]

    def _written(self, call: ToolCall) -> dict[str, Any]:
        form = self._conversation.form
        id_ = new_id(None if form is None else form.id_length)
        return {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _reason(self, piece: Piece, called: bool) -> str | None:
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason


def _log_probabilities(served: Served, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
    """Entries whose `bytes`, joined, are the text's; null: the text does not show the token."""

    def entry(id_: int, probability: float | None, content: bytes | None) -> dict[str, Any]:
        shown = None if content is None else list(content)
        return {"token": served.token_text(id_, content), "logprob": probability, "bytes": shown}

    def others(likeliest: Sequence[tuple[int, float]], place: Place) -> list[dict[str, Any]]:
        return [entry(id_, value, served.alternative(id_, place)) for id_, value in likeliest]

    content = [
        entry(token.id, token.log_probability, place.content) | {"top_logprobs": others(token.likeliest, place)}
        for token, place in tokens
    ]
    return {"content": content, "refusal": None}
