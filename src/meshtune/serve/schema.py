"""The requests of the OpenAI API that are honoured, field by field, and those that are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshtune.generate.config import Sampling
from meshtune.serve.errors import ApiError
from meshtune.serve.grammar import JSON_OBJECT
from meshtune.serve.tools import EarlierCall, ToolDefinition

# Said by clients, and without a meaning for what is generated here.
HARMLESS = {
    "user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "verbosity", "suffix", "best_of",
}  # fmt: skip


class Content(BaseModel):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(BaseModel):
    """A message of a conversation, of which other fields reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Content] | None = None
    tool_calls: list[EarlierCall] | None = None

    def rendered(self, where: str) -> dict[str, Any]:
        """The message as chat templates read it. Raises ApiError for content that is not text."""
        content = self.content
        if isinstance(content, list):
            if kind := next((part.type for part in content if part.type != "text"), None):
                raise ApiError(400, f"content of type '{kind}' is not supported: this model reads text", param=where)
            content = "".join(part.text or "" for part in content)
        role = "system" if self.role == "developer" else self.role
        rendered: dict[str, Any] = {**(self.model_extra or {}), "role": role}
        if self.tool_calls:
            if role != "assistant":
                raise ApiError(400, "the assistant alone calls tools", param=f"{where}.tool_calls")
            calls = [call.rendered(f"{where}.tool_calls[{n}]") for n, call in enumerate(self.tool_calls)]
            rendered["tool_calls"], content = calls, content or ""
        if content is None:
            raise ApiError(400, "a message needs content", param=f"{where}.content")
        return rendered | {"content": content}


class StreamOptions(BaseModel):
    """What a stream ends with."""

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """The fields that both kinds of request share."""

    model_config = ConfigDict(extra="allow")
    model: str
    n: Annotated[int, Field(ge=1, le=64)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=512)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    def sampling(self, drawn_seed: int, vocab: int) -> Sampling:
        """How tokens are drawn: OpenAI's defaults (temperature 1), `drawn_seed` where no seed is given."""
        if unknown := next((token for token in self.logit_bias or {} if not 0 <= token < vocab), None):
            raise ApiError(400, f"token id {unknown} is outside the vocabulary of {vocab}", param="logit_bias")
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=self.top_p or 1.0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            seed=(drawn_seed if self.seed is None else self.seed) % 2**31,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((self.logit_bias or {}).items()),
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class JsonSchema(BaseModel):
    """A JSON schema that an answer follows."""

    model_config = ConfigDict(extra="allow")
    name: str
    form: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=lambda: dict(JSON_OBJECT))


class ResponseFormat(BaseModel):
    """What form an answer has."""

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


class ChatRequest(GenerationRequest):
    """A conversation to answer."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Any = None
    tools: Annotated[list[ToolDefinition], Field(max_length=128)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises ApiError for what is asked for and cannot be given."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")

    @property
    def alternatives(self) -> int | None:
        """Likeliest tokens to report beside each one; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """A text to continue, as words or token ids; or several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt. Raises ApiError where there is none."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]  # pyright: ignore[reportReturnType]
        if not prompt:
            raise ApiError(400, "there is no prompt", param="prompt")
        return list(prompt)  # pyright: ignore[reportReturnType]


class ScoreRequest(BaseModel):
    """Texts, or whole conversations, that a reward model is to judge."""

    model_config = ConfigDict(extra="allow")
    model: str
    messages: Annotated[list[str | list[Message]], Field(min_length=1, max_length=256)]


def parsed(kind: type[BaseModel], body: Any) -> Any:
    """A request of this kind. Raises ApiError naming the first field that is wrong or unknown."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        request = kind.model_validate(body)
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"][:3] if not str(part).startswith(("str", "list", "constr")))
        raise ApiError(400, f"{field}: {first['msg']}", param=field) from problem
    if unknown := sorted((request.model_extra or {}).keys() - HARMLESS):
        raise ApiError(400, f"'{unknown[0]}' is not known here", param=unknown[0])
    return request
