"""`/v1/chat/completions`: conversations rendered by the model's chat template, and answers read for reasoning and
calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshtune.calls.formats import HARMONY, AnswerFormat, CallFormat, Tool, ToolCall, new_id
from meshtune.calls.grammar import Lark, LLGrammar, check_size
from meshtune.calls.reader import Delta, Reader, answer_reader
from meshtune.data.pictures.files import data_of_uri, read_size
from meshtune.generate.pictures import PromptPictures, TokenPrompt, split_pictures
from meshtune.generate.text import Place, chat_text, encoded_chat, picture_prompt
from meshtune.serve.guard import ApiError
from meshtune.serve.models import ChoiceDelta, ChoiceRequest, PlacedToken, Served
from meshtune.serve.schema import ChatRequest, read_tools

if TYPE_CHECKING:
    from meshtune.data.pictures.reader import PictureReader

PIXELS = 1 << 25  # of all pictures of a request, before they are scaled
PICTURE_BYTES = 1 << 31  # of the patches of all requests that run or wait, of one batch
# What the function that renders a template takes itself.
_RESERVED = frozenset({"messages", "tools", "chat_template", "add_generation_prompt", "tokenize", "documents"})
_NO_EFFORT = ("none", "minimal")


class PlainReader:
    """Reads answers that are content and nothing else."""

    def push(self, text: str) -> list[Delta]:
        """The parts that this text completes."""
        return [Delta(content=text)] if text else []

    def finish(self) -> list[Delta]:
        """Nothing is held back."""
        return []


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a prompt, and how answers to it are written.

    `tools` may be called, and one of `required` must be.
    """

    ids: list[int]
    tools: Mapping[str, Tool]
    required: Sequence[Tool]
    answer: AnswerFormat
    pictures: PromptPictures | None = None

    @property
    def plain(self) -> bool:
        """Whether the answer is content and nothing else."""
        return self.answer.think is None and self.answer.calls is None


@dataclasses.dataclass(frozen=True)
class ChatCompletion:
    """A chat completion: the choices that the engine is asked for, and how they are written in a response or a
    stream."""

    request: ChatRequest
    served: Served
    choices: Sequence[ChoiceRequest]
    form: CallFormat | None
    readers: Sequence[Reader]
    calls: list[int]  # tool calls of each choice so far
    scores_prompt = False

    @property
    def head(self) -> dict[str, Any]:
        """The fields of a response or a chunk, but its choices."""
        name = "chat.completion.chunk" if self.request.stream else "chat.completion"
        return self.served.response_head("chatcmpl", name)

    def choice(self, request: ChoiceRequest, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """A choice of a whole response, with its message."""
        tokens = [token for delta in deltas for token in delta.tokens]
        parts = [part for delta in deltas for part in self._read(delta)]
        calls = [self._tool_call(part.call) for part in parts if part.call is not None]
        content = "".join(part.content for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(part.reasoning for part in parts):
            message["reasoning_content"] = reasoning
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": request.index,
            "message": message,
            "logprobs": _log_probabilities(self.served, tokens) if self.request.logprobs else None,
            "finish_reason": _finish_reason(deltas[-1], bool(calls)),
        }

    def first_chunks(self) -> list[dict[str, Any]]:
        """The choices that a stream begins with: their role."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": n, "delta": delta, "logprobs": None, "finish_reason": None} for n in range(self.request.n)]

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The choices of a stream's chunks for new text."""
        messages: list[dict[str, Any]] = []
        for part in self._read(delta):
            messages += self._call_deltas(delta.index, part.call) if part.call is not None else [_message_delta(part)]
        logprobs = None
        if delta.tokens:
            messages, logprobs = messages or [{"content": ""}], _log_probabilities(self.served, delta.tokens)
        deltas: list[tuple[dict[str, Any], str | None]] = [(message, None) for message in messages]
        if delta.finish_reason is not None:
            deltas.append(({}, _finish_reason(delta, self.calls[delta.index] > 0)))
        return [
            {"index": delta.index, "delta": message, "logprobs": None if n else logprobs, "finish_reason": reason}
            for n, (message, reason) in enumerate(deltas)
        ]

    def _read(self, delta: ChoiceDelta) -> list[Delta]:
        reader = self.readers[delta.index]
        return reader.push(delta.text) + (reader.finish() if delta.finish_reason is not None else [])

    def _call_deltas(self, index: int, tool_call: ToolCall) -> list[dict[str, Any]]:
        number, self.calls[index] = self.calls[index], self.calls[index] + 1
        call = self._tool_call(tool_call)
        arguments = call["function"].pop("arguments")
        call["function"]["arguments"] = ""
        return [
            {"tool_calls": [{"index": number, **call}]},
            {"tool_calls": [{"index": number, "function": {"arguments": arguments}}]},
        ]

    def _tool_call(self, call: ToolCall) -> dict[str, Any]:
        id_ = new_id(None if self.form is None else self.form.id_length)
        return {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def prepare_chat(request: ChatRequest, served: Served, client: str, seed: int) -> ChatCompletion:
    """Renders the conversation of a request; every choice is drawn from it with another seed.

    Raises ApiError and UserError for a conversation that the template or the model cannot have, and for a schema.
    """
    engine, prompt = served.model.engine, render_chat(request, served)
    stop_ids, turn_end = served.chat_stops
    constrained = request.response_format is not None or prompt.required
    first = engine.request(
        prompt.ids,
        sampling=request.sampling(seed, engine.spec.vocab),
        max_tokens=request.max_completion_tokens or request.max_tokens or max(1, engine.context - len(prompt.ids)),
        stop_ids=stop_ids,
        alternatives=(request.top_logprobs or 0) if request.logprobs else None,
        client=client,
        grammar=answer_grammar(request, prompt, served) if constrained else None,
        pictures=prompt.pictures,
    )
    stop = (*request.stops, *turn_end)
    visible = frozenset() if prompt.plain else prompt.answer.visible_ids(served.model.tokenizer)
    choices = [
        ChoiceRequest(n, first.with_seed_of(n), stop, continued=False, visible=visible) for n in range(request.n)
    ]
    readers = [PlainReader() if prompt.plain else answer_reader(prompt.answer, prompt.tools) for _ in choices]
    return ChatCompletion(request, served, choices, prompt.answer.calls, readers, [0] * request.n)


def render_chat(request: ChatRequest, served: Served) -> ChatPrompt:
    """Renders a request's conversation by the model's chat template.

    Raises ApiError and UserError for tools or options that the template does not know, and messages that it refuses.
    """
    tokenizer = served.model.tokenizer
    tools, required = read_tools(request) if request.tools or request.tool_choice is not None else ({}, [])
    template = str(tokenizer.get_chat_template(None, tools=[{}] if tools else None)) if tokenizer.chat_template else ""
    reader, pictures = served.model.picture_reader, list[bytes]()
    messages = [message.rendered(f"messages[{n}]", reader is not None) for n, message in enumerate(request.messages)]
    if reader is not None:
        messages, pictures = open_pictures(served, reader, messages)
    has_options = request.chat_template_kwargs or request.reasoning_effort is not None
    options = _template_options(request, template) if has_options else {}
    text = chat_text(tokenizer, messages, [tool.definition for tool in tools.values()], options, reader)
    answer = AnswerFormat.of_prompt(template, text)
    if tools:
        _check_tools_shown(tools, answer.calls, text, chat_text(tokenizer, messages, (), options, reader))
    served.check_text(text, "messages")
    if answer.calls is not HARMONY and not tools:
        answer = dataclasses.replace(answer, calls=None)
    prompt = picture_prompt(tokenizer, text, pictures, reader) if reader else TokenPrompt(encoded_chat(tokenizer, text))
    return ChatPrompt(prompt.ids, tools, required, answer, prompt.pictures)


def open_pictures(
    served: Served, reader: PictureReader, messages: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """(messages as chat templates read them, the files in their data URIs after a look at the headers).

    Raises ApiError for more pixels than a request may have, more tokens than the context, and where the server has no
    memory for their patches; UserError for a file that is damaged or no picture.
    """
    plain, addresses = split_pictures(messages)
    contents, pixels, tokens, patches = [], 0, 0, 0
    for n, address in enumerate(addresses):
        contents.append(data_of_uri(str(address), f"picture {n}"))
        width, height = read_size(contents[-1], f"picture {n}")
        layout = reader.layout(width, height)
        pixels, tokens = pixels + width * height, tokens + len(layout.ids)
        patches += layout.patches
    if pixels > PIXELS:
        raise ApiError(400, f"the pictures have {pixels:,} pixels, and {PIXELS:,} are read at most", param="messages")
    if tokens >= (context := served.model.engine.context):
        message = f"the pictures are {tokens} tokens, and the model's context is {context}; send fewer or smaller ones"
        raise ApiError(400, message, param="messages")
    if patches and 4 * (patches + served.worker.patches) * reader.pixels > PICTURE_BYTES:
        raise ApiError(429, "the server holds as many pictures as it can; try again in a while", code="queue_full")
    return plain, contents


def answer_grammar(request: ChatRequest, prompt: ChatPrompt, served: Served) -> LLGrammar | None:
    """The grammar that an answer must follow: calls of the required tools, or the schema of the request's format; None
    where the format is text. Raises UserError for a schema that cannot be compiled."""
    schema = None if request.response_format is None else request.response_format.schema_of_answer
    if schema is None and not prompt.required:
        return None
    where = "tools" if prompt.required else "response_format"
    check_size([tool.parameters for tool in prompt.required] or [schema or {}], where)
    grammars = served.chat_grammars
    if schema is not None and prompt.plain:
        return grammars.json(schema, where)
    lark = Lark(grammars.special)
    if prompt.required:
        assert prompt.answer.calls is not None
        several = len(prompt.required) == len(prompt.tools) and request.parallel_tool_calls is not False
        body = prompt.answer.calls.grammar(lark, prompt.required, several and request.tool_choice == "required")
    else:
        assert schema is not None
        head = lark.literal("<|channel|>final<|message|>") if prompt.answer.calls is HARMONY else ""
        body = f"{head} {lark.json(schema)}"
    return grammars.lark(lark.whole(f"{_reasoning_grammar(prompt, lark)} {body}"), where)


def _reasoning_grammar(prompt: ChatPrompt, lark: Lark) -> str:
    """The reasoning that may come before the constrained part."""
    if prompt.answer.calls is HARMONY:
        start = f"{lark.literal('<|channel|>analysis<|message|>')} {lark.until('<|end|>')}"
        return f"({start} {lark.literal('<|start|>assistant')})?"
    if prompt.answer.think is None:
        return ""
    text = f'{lark.until(prompt.answer.think[1])} ("\\n" "\\n"?)?'
    return text if prompt.answer.thinks else f"({lark.literal(prompt.answer.think[0])} {text})?"


def _check_tools_shown(tools: Mapping[str, Tool], form: CallFormat | None, text: str, without: str) -> None:
    """Raises ApiError where the template does not show the tools to the model, or writes calls in an unknown way."""
    if text == without or any(name not in text for name in tools):
        raise ApiError(
            400,
            "the chat template of this model does not show it the tools, so it cannot call them; a model may be "
            "served with another template that does (--chat-template chatml)",
            param="tools",
        )
    if form is None:
        raise ApiError(400, "how this model's chat template writes calls of tools is not known", param="tools")


def _template_options(request: ChatRequest, template: str) -> dict[str, Any]:
    """Variables of the template. Raises ApiError for one that it does not read."""
    options = dict(request.chat_template_kwargs or {})
    for name in options:
        if name in _RESERVED or len(name) > 100 or not re.search(rf"\b{re.escape(name)}\b", template):
            message = f"the chat template of this model has no option '{name[:100]}'"
            raise ApiError(400, message, param=f"chat_template_kwargs.{name[:100]}")
    if (effort := request.reasoning_effort) is not None:
        switch = next((name for name in ("enable_thinking", "thinking") if re.search(rf"\b{name}\b", template)), None)
        if re.search(r"\breasoning_effort\b", template):
            options.setdefault("reasoning_effort", effort)
        elif switch is not None:
            options.setdefault(switch, effort not in _NO_EFFORT)
        else:
            raise ApiError(400, "the chat template of this model has no reasoning", param="reasoning_effort")
    return options


def _message_delta(part: Delta) -> dict[str, Any]:
    return {"content": part.content} if part.content else {"reasoning_content": part.reasoning}


def _finish_reason(delta: ChoiceDelta, called: bool) -> str | None:
    return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason


def _log_probabilities(served: Served, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
    """Entries whose `bytes`, joined, are the text's; null: the text does not show the token."""

    def entry(id_: int, probability: float | None, content: bytes | None) -> dict[str, Any]:
        shown = None if content is None else list(content)
        return {"token": served.token_text(id_, content), "logprob": probability, "bytes": shown}

    def alternatives(likeliest: Sequence[tuple[int, float]], place: Place) -> list[dict[str, Any]]:
        return [entry(id_, value, served.alternative(id_, place)) for id_, value in likeliest]

    content = [
        entry(token.id, token.log_probability, place.content) | {"top_logprobs": alternatives(token.likeliest, place)}
        for token, place in tokens
    ]
    return {"content": content, "refusal": None}
