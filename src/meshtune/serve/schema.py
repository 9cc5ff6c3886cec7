"""The requests of the OpenAI API that are accepted, field by field, tools among them, and those that are refused by
name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError

from meshtune.calls.formats import Tool
from meshtune.calls.grammar import JSON_OBJECT
from meshtune.generate.request import Sampling
from meshtune.serve.guard import ApiError, parse_json

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class FunctionDefinition(BaseModel):
    """A function that a model may call."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(BaseModel):
    """A tool; functions are the only kind."""

    type: str
    function: FunctionDefinition


class CalledFunction(BaseModel):
    """The function that an earlier turn called; the arguments are JSON as text."""

    name: str
    arguments: str | dict[str, Any]


class EarlierCall(BaseModel):
    """A call of an earlier turn of the assistant."""

    id: str | None = None
    type: str = "function"
    function: CalledFunction

    def rendered(self, where: str) -> dict[str, Any]:
        """The call as chat templates read it, its arguments an object. Raises ApiError for arguments that are none."""
        arguments = self.function.arguments
        if isinstance(arguments, str):
            arguments = _object(arguments, f"{where}.function.arguments")
        if not self.function.name:
            raise ApiError(400, "a call needs the name of a function", param=f"{where}.function.name")
        call = {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id, **call}


def read_tools(request: ChatRequest) -> tuple[dict[str, Tool], list[Tool]]:
    """The tools that may be called, by name, and those of which the model must call one. Raises ApiError."""
    tools = _named_tools(request.tools or [])
    required = _required_tools(request.tool_choice, tools)
    return ({} if request.tool_choice == "none" else tools), required


def _named_tools(definitions: list[ToolDefinition]) -> dict[str, Tool]:
    """Tools by name. Raises ApiError for one without a proper name, of another kind, or whose name is given twice."""
    tools: dict[str, Tool] = {}
    for n, definition in enumerate(definitions):
        where = f"tools[{n}]"
        if definition.type != "function":
            raise ApiError(400, f"tools of type '{definition.type[:100]}' are not known here", param=f"{where}.type")
        function = definition.function
        if not _NAME.fullmatch(function.name):
            message = f"'{function.name[:128]}' is no name for a tool: give 1 to 128 letters, digits, _, . or -"
            raise ApiError(400, message, param=f"{where}.function.name")
        if function.name in tools:
            raise ApiError(400, f"two tools are called '{function.name}'", param=f"{where}.function.name")
        parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
        if parameters.get("type", "object") != "object":
            raise ApiError(400, "arguments of a tool are an object", param=f"{where}.function.parameters.type")
        _check_schema(parameters, f"{where}.function.parameters")
        shown = {"name": function.name, "description": function.description or "", "parameters": parameters}
        tools[function.name] = Tool(function.name, parameters, {"type": "function", "function": shown})
    return tools


def _required_tools(choice: Any, tools: Mapping[str, Tool]) -> list[Tool]:
    """The tools that the model must choose from; none where the model decides. Raises ApiError for an unknown
    choice."""
    match choice:
        case None | "auto" | "none":
            return []
        case "required" if tools:
            return list(tools.values())
        case {"type": "function", "function": {"name": str(name)}} if name in tools:
            return [tools[name]]
        case {"type": "function", "function": {"name": str(name)}} if tools:
            raise ApiError(
                400, f"no tool is called '{str(name)[:128]}'; there are: {', '.join(tools)}", param="tool_choice"
            )
        case "required" | {"type": "function"} if not tools:
            raise ApiError(400, "a tool is to be called, and there is none", param="tool_choice")
        case _:
            message = "tool_choice is auto, none, required or {type: function, function: {name: ...}}"
            raise ApiError(400, message, param="tool_choice")


def _check_schema(schema: Any, where: str) -> None:
    """Raises ApiError where the parts of a schema that formats of calls read have another type."""
    if not isinstance(schema, Mapping):
        return
    for name, kind in (("properties", Mapping), ("required", list), ("enum", list)):
        if not isinstance(schema.get(name, [] if kind is list else {}), kind):
            form = "an object" if kind is Mapping else "a list"
            raise ApiError(400, f"{name} of a schema is {form}", param=f"{where}.{name}")
    if not all(isinstance(name, str) for name in schema.get("required", [])):
        raise ApiError(400, "required of a schema is a list of names", param=f"{where}.required")
    for name, inner in schema.get("properties", {}).items():
        _check_schema(inner, f"{where}.properties.{name[:100]}")
    _check_schema(schema.get("items"), f"{where}.items")


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = parse_json(text or "{}")
    except ValueError as problem:
        raise ApiError(400, f"the arguments of a call are not JSON: {problem}", param=where) from problem
    if not isinstance(value, dict):
        raise ApiError(400, "the arguments of a call are a JSON object", param=where)
    return value


GREATEST = 2**31 - 1  # a whole number that the devices compute with
MESSAGES, PARTS, CALLS, TOOLS, STOPS, BIASES = 10_000, 1_000, 128, 128, 16, 512  # in a request, at most


def _integer(least: int, greatest: int = GREATEST) -> Any:
    return Annotated[int, Field(strict=True, ge=least, le=greatest)]


def _number(least: float, greatest: float) -> Any:
    return Annotated[float, Field(strict=True, ge=least, le=greatest, allow_inf_nan=False)]


def _prompts(value: Any) -> Any:
    """A text, token ids, or a list of those, as a list of them. Pydantic would collect an error for each one."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    for prompt in several:
        if not (
            isinstance(prompt, str)
            or (isinstance(prompt, list) and all(type(id_) is int and -1 < id_ < 2**31 for id_ in prompt))
        ):
            raise ValueError("give a text, a list of token ids, or a list of those")
    if several == [[]]:
        raise ValueError("there is no prompt")
    return several


def _biases(value: Any) -> Any:
    """The keys as numbers."""
    if not isinstance(value, dict) or len(value) > BIASES:
        raise ValueError(f"give an object of at most {BIASES} token ids with what is added to their logits")
    if wrong := next((key for key in value if not (key.isascii() and key.isdigit() and len(key) < 11)), None):
        raise ValueError(f"'{wrong[:40]}' is no token id")
    return {int(key): bias for key, bias in value.items()}


_BRANCH = re.compile(r"str|constrained-str|(list|function-\w+)[\[(].*")  # of a union, as pydantic names them
Text = Annotated[str, Field(max_length=1_000)]


# Sent by clients, and without an effect on the answer.
HARMLESS = {
    "user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "verbosity",
}  # fmt: skip


class PictureAddress(BaseModel):
    """Where a picture is: in a data URI. `detail` is of no effect, for models have a resolution of their own."""

    url: str
    detail: Text | None = None


class ContentPart(BaseModel):
    """A part of a message's content."""

    type: Text
    text: str | None = None
    image_url: PictureAddress | None = None

    def rendered(self, where: str) -> dict[str, Any]:
        """The part as `generate.pictures` reads it. Raises ApiError for what is neither text nor a picture."""
        if self.type == "text":
            return {"type": "text", "text": self.text or ""}
        if self.type != "image_url":
            message = f"content of type '{self.type}' is not supported: this model reads text and pictures"
            raise ApiError(400, f"{message}; of a video give frames as pictures", param=where)
        if self.image_url is None:
            raise ApiError(400, "a picture needs image_url: {url: ...}", param=f"{where}.image_url")
        if self.image_url.url[:5].lower() != "data:":
            message = "addresses of pictures are never fetched; send the picture itself as a data URI"
            raise ApiError(400, f"{message} (data:image/png;base64,...)", param=f"{where}.image_url.url")
        return {"type": "image", "image": self.image_url.url}


class ChatMessage(BaseModel):
    """A message of a conversation, whose other fields reach the chat template unchanged."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=PARTS, fail_fast=True)] | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=CALLS, fail_fast=True)] | None = None

    def rendered(self, where: str, sees: bool = False) -> dict[str, Any]:
        """The message as chat templates read it; of a model that `sees` it may have pictures. Raises ApiError for other
        content."""
        content: Any = self.content
        if isinstance(content, list):
            content = _render_parts(content, where) if sees else _join_texts(content, where)
        role = "system" if self.role == "developer" else self.role
        calls = self._render_calls(f"{where}.tool_calls") if self.tool_calls else {}
        if content is None and not calls:
            raise ApiError(400, "a message needs content", param=f"{where}.content")
        return {**(self.model_extra or {}), "role": role, **calls, "content": content or ""}

    def _render_calls(self, where: str) -> dict[str, Any]:
        if self.role != "assistant":
            raise ApiError(400, "the assistant alone calls tools", param=where)
        return {"tool_calls": [call.rendered(f"{where}[{n}]") for n, call in enumerate(self.tool_calls or ())]}


def _render_parts(parts: list[ContentPart], where: str) -> list[dict[str, Any]]:
    return [part.rendered(f"{where}.content[{n}]") for n, part in enumerate(parts)]


def _join_texts(parts: list[ContentPart], where: str) -> str:
    if kind := next((part.type for part in parts if part.type != "text"), None):
        raise ApiError(400, f"content of type '{kind}' is not supported: this model reads text", param=where)
    return "".join(part.text or "" for part in parts)


class StreamOptions(BaseModel):
    """Options of the end of a stream."""

    include_usage: StrictBool = False


_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class CompletionFields(BaseModel):
    """The fields that both kinds of request share, with OpenAI's defaults."""

    model_config = ConfigDict(extra="allow")
    model: Text
    n: _integer(1, 64) = 1
    max_tokens: _integer(0) | None = None
    temperature: _number(0, 100) = 1.0
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    top_k: _integer(-1) = 0
    min_p: _number(0, 1) = 0.0
    presence_penalty: _number(-2, 2) = 0.0
    frequency_penalty: _number(-2, 2) = 0.0
    repetition_penalty: _number(0.01, 100) = 1.0
    logit_bias: Annotated[dict[int, _number(-100, 100)], BeforeValidator(_biases)] = Field(default_factory=dict)
    seed: _integer(-(2**63), 2**63 - 1) | None = None
    stop: Text | Annotated[list[Text], Field(max_length=STOPS, fail_fast=True)] | None = None
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()

    def sampling(self, drawn_seed: int, vocab: int) -> Sampling:
        """How tokens are drawn, with `drawn_seed` where none is given. Raises ApiError for the bias of a token that is
        outside the vocabulary."""
        if (token := max(self.logit_bias, default=0)) >= vocab:
            raise ApiError(400, f"token id {token} is outside the vocabulary of {vocab}", param="logit_bias")
        seed = (drawn_seed if self.seed is None else self.seed) % 2**31
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return Sampling(top_k=max(0, self.top_k), seed=seed, logit_bias=tuple(self.logit_bias.items()), **numbers)

    def check_number(self, prompts: int, capacity: int | None) -> None:
        """Raises ApiError for more answers than a server takes at once."""
        if capacity is not None and prompts * self.n > capacity:
            raise _number_error(prompts, self.n, capacity)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _number_error(prompts: int, n: int, capacity: int) -> ApiError:
    subject = f"{prompts} prompts" if prompts > 1 else "one prompt"
    message = f"{subject} with n = {n} are {prompts * n} answers, and {capacity} at most are taken"
    return ApiError(400, f"{message}; give fewer at once", param="prompt" if prompts > 1 else "n")


class JsonSchema(BaseModel):
    """A JSON schema that an answer follows."""

    model_config = ConfigDict(extra="allow")
    name: Text
    form: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=lambda: dict(JSON_OBJECT))


class ResponseFormat(BaseModel):
    """The form of an answer."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that the answer follows; None: it is any text. Raises ApiError where it is missing."""
        if self.type == "json_schema" and self.json_schema is None:
            raise ApiError(400, "the type json_schema needs a schema", param="response_format.json_schema")
        if self.type == "json_object":
            return dict(JSON_OBJECT)
        return self.json_schema.form if self.type == "json_schema" and self.json_schema else None


class ChatRequest(CompletionFields):
    """A conversation to answer."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES, fail_fast=True)]
    max_tokens: _integer(1) | None = None
    max_completion_tokens: _integer(1) | None = None
    logprobs: StrictBool | None = None
    top_logprobs: _integer(0, 20) | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Any = None
    tools: Annotated[list[ToolDefinition], Field(max_length=TOOLS, fail_fast=True)] | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self, capacity: int | None) -> None:
        """Raises ApiError for what cannot be given by a server that takes `capacity` answers at once."""
        self.check_number(1, capacity)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")


class CompletionRequest(CompletionFields):
    """A text to continue, as words or token ids; or several. `prompt_logprobs` is vLLM's."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    logprobs: _integer(0, 20) | None = None
    prompt_logprobs: _integer(0, 20) | None = None
    echo: StrictBool = False
    best_of: _integer(1) | None = None
    suffix: str | None = None

    def check(self, capacity: int | None) -> None:
        """Raises ApiError for what cannot be given by a server that takes `capacity` answers at once."""
        if self.stream and self.echo:
            raise ApiError(400, "echo cannot be streamed", param="echo")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: 0 needs echo: true, to score the prompt alone", param="max_tokens")
        if self.suffix:
            raise ApiError(400, "a suffix is not supported: this model continues texts", param="suffix")
        if self.best_of not in (None, self.n):
            raise ApiError(400, "best_of other than n is not supported", param="best_of")
        self.check_number(len(self.prompt), capacity)


class ScoreRequest(BaseModel):
    """Texts, or whole conversations, that a reward model is to judge."""

    model_config = ConfigDict(extra="allow")
    model: Text
    messages: Annotated[
        list[str | Annotated[list[ChatMessage], Field(max_length=MESSAGES, fail_fast=True)]],
        Field(min_length=1, max_length=256, fail_fast=True),
    ]


class TokenizeRequest(BaseModel):
    """A text to cut into tokens, in the form of vLLM's API."""

    model_config = ConfigDict(extra="allow")
    model: Text | None = None
    prompt: str
    add_special_tokens: StrictBool = True


class DetokenizeRequest(BaseModel):
    """Token ids to write as text."""

    model_config = ConfigDict(extra="allow")
    model: Text | None = None
    tokens: Annotated[list[_integer(0)], Field(fail_fast=True)]


def parse_request(kind: type[BaseModel], body: Mapping[str, Any]) -> Any:
    """A request of this kind. Raises ApiError naming the first field that is wrong or unknown."""
    try:
        request = kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as problem:
        raise _first_error(problem) from problem
    if unknown := sorted((request.model_extra or {}).keys() - HARMLESS):
        raise ApiError(400, f"'{unknown[0][:100]}' is not known here", param=unknown[0][:100])
    return request


def _first_error(problem: ValidationError) -> ApiError:
    first = problem.errors(include_url=False, include_input=False)[0]
    parts = [str(part)[:100] for part in first["loc"][:3] if not _BRANCH.fullmatch(str(part))]
    field, message = ".".join(parts), first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{field}: {message}", param=field)
