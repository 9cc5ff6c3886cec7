"""A tokenizer's chat template: rendering of conversations as transformers does it, within bounds, and the end-of-turn
marker.

`apply_chat_template` copies and normalises every message on every call, which takes longer than most templates. For
messages whose keys are role and content and whose values are text there is nothing to normalise.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.nodes
from transformers.utils import chat_template_utils

from meshtune.data.chat_templates import suggested_template, template_text
from meshtune.data.conversation import Conversation, JsonObject
from meshtune.data.dialect import REASONING_KEYS, Dialect, Messages, as_dict, call_and_results, measure
from meshtune.data.template_environment import TemplateLimitError, bounded_environment, render
from meshtune.errors import UserError
from meshtune.json_text import read_json, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.data.pictures.reader import PictureReader

_PLAIN = {"role", "content"}


def needs_adapting(messages: Messages) -> bool:
    """Whether messages have calls, results or reasoning, which templates read in different forms."""
    return any(
        message.get("tool_calls") or message["role"] == "tool" or any(key in message for key in REASONING_KEYS)
        for message in messages
    )


def is_plain(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether there are messages, and all have a role and a content of exact type str and nothing else."""
    return bool(messages) and all(
        type(message) is dict and message.keys() == _PLAIN and type(message["role"]) is type(message["content"]) is str
        for message in messages
    )


class CompiledTemplate:
    """A chat template compiled once; the tokenizer gives its special tokens to every template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str):
        self.text, self._template = text, _compile(text)
        self._variables = dict(tokenizer.special_tokens_map)

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names of variables that the template reads."""
        names = bounded_environment().parse(self.text).find_all(jinja2.nodes.Name)
        return frozenset(name.name for name in names if name.ctx == "load")

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        generation_prompt: bool = False,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Renders `messages`, followed by the generation prompt if asked for; `options` are further variables of the
        template. Raises as templates do, and TemplateLimitError."""
        plain = not tools and not options and is_plain(messages)
        variables: dict[str, Any] = {
            "messages": [dict(message) for message in messages] if plain else _normalise(messages),
            "tools": _plain(list(tools)) if tools else None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            **self._variables,
        }
        return render(self._template, variables | _plain(dict(options)) if options else variables)


@functools.lru_cache(maxsize=64)
def _compile(text: str) -> Any:
    return bounded_environment().from_string(text)


def _plain(value: Any) -> Any:
    """A value made of JSON's types only, as the installed transformers hands it to templates."""
    rebuild = getattr(chat_template_utils, "_plain_template_data", None)
    return value if rebuild is None else rebuild(value)


def _normalise(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Messages as the installed transformers hands them to templates: newer versions give reasoning under the names
    that other templates read it by."""
    plain = _plain([dict(message) for message in messages])
    alias = getattr(chat_template_utils, "_alias_reasoning_fields", None)
    return plain if alias is None else alias(plain)


# Some templates write today's date into the prompt. Training must not depend on the day it is resumed, so templates get
# a fixed date, the one that Meta's templates fall back to.
FIXED_DATE = {"%d": "26", "%b": "Jul", "%B": "July", "%m": "07", "%Y": "2024", "%y": "24", "%A": "Friday", "%a": "Fri"}
FIXED_DATE |= {"%H": "12", "%I": "12", "%M": "00", "%S": "00", "%p": "PM", "%-d": "26", "%-m": "7", "%Z": "UTC"}

_QUESTION = {"role": "user", "content": "question"}

# A template is a program: it can raise an exception of its own, or Python's errors inside expressions.
# SyntaxError: loops nested deeper than Python compiles; RuntimeError: macros that call themselves for ever; NameError:
# an infinite constant, which Jinja writes as a name.
_FAILURES = (
    jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NameError,
    RuntimeError, SyntaxError, TypeError, ValueError,
)  # fmt: skip


def _in_parts(message: Mapping[str, object]) -> dict[str, object]:
    """The message with its text as a content part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


@dataclasses.dataclass(frozen=True)
class EndOfTurn:
    """The text that a template writes after the content of an assistant turn.

    `head` must be trained on for the model to learn to stop; `tail` need not be. `token` is the id of the special token
    that ends `head`, None where the template ends turns with plain text.
    """

    head: str
    tail: str
    token: int | None


class ChatTemplate:
    """The chat template of a tokenizer, rendered in the environment of transformers' `apply_chat_template`.

    With `pictures` the texts are those that the model's processor makes of the template's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, pictures: PictureReader | None = None):
        self.tokenizer, self.pictures = tokenizer, pictures
        if not tokenizer.chat_template:
            raise _no_template_error(tokenizer)

    @functools.cached_property
    def writes_date(self) -> bool:
        """Whether the template writes today's date."""
        return "strftime_now" in str(self.tokenizer.chat_template)

    @functools.cached_property
    def _without_tools(self) -> CompiledTemplate:
        return self._compile(None)

    @functools.cached_property
    def _with_tools(self) -> CompiledTemplate:
        """The template for conversations with tools, which some tokenizers have separately."""
        return self._compile([{}])

    def _compile(self, tools: list[dict[str, object]] | None) -> CompiledTemplate:
        text = self.tokenizer.get_chat_template(None, tools=tools)  # pyright: ignore[reportArgumentType]
        return CompiledTemplate(self.tokenizer, self._with_fixed_date(text))

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names of variables that the template reads."""
        return self._without_tools.variables | self._with_tools.variables

    @functools.cached_property
    def alternatives(self) -> Mapping[str, ChatTemplate]:
        """Templates that ship with Meshtune and suit the tokenizer, by name: that of its family, and plain."""
        chats = {}
        for name in dict.fromkeys((suggested_template(self.tokenizer), "plain")):
            if template_text(name) != self.tokenizer.chat_template:
                tokenizer = copy.copy(self.tokenizer)
                tokenizer.chat_template = template_text(name)
                chats[name] = ChatTemplate(tokenizer, self.pictures)
                chats[name].alternatives = {}  # which have none themselves
        return chats

    @functools.cached_property
    def unwritten(self) -> dict[object, frozenset[int]]:
        """Conversations by their shape -> the messages of such that the template does not write (see rendered)."""
        return {}

    def _with_fixed_date(self, text: str) -> str:
        if "strftime_now" not in text:
            return text
        value = "format" + "".join(f".replace({key!r}, {value!r})" for key, value in sorted(FIXED_DATE.items()))
        # transformers sets trim_blocks, which removes the newline.
        return "{%- macro strftime_now(format) -%}{{ " + value + " }}{%- endmacro %}\n" + text

    def render(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = (), **options: Any
    ) -> str:
        """Renders `messages` as CompiledTemplate.render does. Raises one of `failures`."""
        template = self._with_tools if tools else self._without_tools
        if self._reads_parts_only:
            messages = [_in_parts(message) for message in messages]
        text = template.render(messages, tools, **options)
        return text if self.pictures is None else self.pictures.write(text)

    @functools.cached_property
    def _reads_parts_only(self) -> bool:
        """Whether the template writes contents that are lists of parts and not those that are text, as SmolVLM's."""
        for question, reads_parts in ((_QUESTION, False), (_in_parts(_QUESTION), True)):
            with contextlib.suppress(*_FAILURES):
                if str(_QUESTION["content"]) in self._without_tools.render([question]):
                    return reads_parts
        return False

    failures = _FAILURES

    @functools.cached_property
    def dialect(self) -> Dialect:
        """How the template expects tool calls, results and reasoning, and which of them it writes."""
        return measure(self._render_or_none)

    def _render_or_none(self, messages: Messages, tools: Sequence[JsonObject]) -> str | None:
        try:
            return self.render(messages, tools)
        except TemplateLimitError:
            raise
        except _FAILURES:
            return None

    def messages(self, conversation: Conversation) -> list[dict[str, object]]:
        """The messages of a conversation as this template reads them."""
        return self.adapt(as_dicts(conversation))

    def adapt(self, messages: Messages) -> list[dict[str, object]]:
        """Messages in OpenAI's form as this template reads them."""
        if needs_adapting(messages):
            return self.dialect.adapt(messages)
        return [dict(message) for message in messages]

    @functools.cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens of the tokenizer that are not white space."""
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple(token.content for token in added if token.special and token.content.strip())

    @functools.cached_property
    def role_ends(self) -> Mapping[str, str]:
        """Tokens of the next turn that end the assistant's, by the next role: of templates that write no other end.

        Only those at which the model's generation stops, as GLM's <|user|> and <|observation|>.
        """
        return {} if self.end_of_turn.head else self._measured_role_ends()

    def _measured_role_ends(self) -> Mapping[str, str]:
        answer = {"role": "assistant", "content": "\ue000answer\ue001"}
        texts = {"user": self._render_or_none([_QUESTION, answer, _QUESTION], ())}
        written = {"user": str(answer["content"])}
        if self.dialect.call_end:
            called = call_and_results(self.dialect, "value")
            texts["tool"], written["tool"] = self._render_or_none([_QUESTION, *called], ()), self.dialect.call_end
        stops = stop_tokens(self.tokenizer)
        ends = {}
        for role, text in texts.items():
            if text is not None and written[role] in text:
                tail = text[text.index(written[role]) + len(written[role]) :]
                token = max((token for token in stops if tail.startswith(token)), key=len, default=None)
                if token is not None:
                    ends[role] = token
        return ends

    @functools.cached_property
    def end_of_turn(self) -> EndOfTurn:
        """The text that the template writes after the last assistant turn, found by rendering a short conversation."""
        content, where = "\ue000answer\ue001", str(self.tokenizer.name_or_path)
        try:
            text = self.render([_QUESTION, {"role": "assistant", "content": content}])
        except _FAILURES as problem:
            raise template_error(problem, where=where) from problem
        if text.count(content) != 1:
            problem = f"the chat template writes the content of an assistant turn {text.count(content)} times, not once"
            fix = "set model.chat_template to a template that renders assistant turns"
            raise UserError(problem, where=where, fix=fix)
        _, _, ending = text.partition(content)
        added = ((token.content, id_) for id_, token in self.tokenizer.added_tokens_decoder.items())
        tokens = [(ending.find(text), -len(text), id_) for text, id_ in added if text.strip() and text in ending]
        # The first special token, the longest of several there; else all but white space.
        start, negative_length, id_ = min(tokens, default=(0, -len(ending.rstrip()), None))
        end = start - negative_length
        return EndOfTurn(ending[:end], ending[end:], id_)


def _no_template_error(tokenizer: PreTrainedTokenizerFast) -> UserError:
    return UserError(
        "the tokenizer has no chat template, but the data are conversations",
        where=str(tokenizer.name_or_path),
        fix="set model.chat_template to a Jinja file or to the name of a template that ships with Meshtune (plain "
        "suits any base model), or use the instruct version's tokenizer",
    )


def template_end(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """The text that ends an answer in the chat template; none without a template, or where it writes no end."""
    if not tokenizer.chat_template:
        return ()
    try:
        end = ChatTemplate(tokenizer).end_of_turn
    except UserError:  # it does not render answers
        return ()
    if end.token is not None:
        return (tokenizer.added_tokens_decoder[end.token].content,)
    return (end.head.strip(),) if end.head.strip() else ()


def stop_tokens(tokenizer: PreTrainedTokenizerFast) -> frozenset[str]:
    """The tokens at which the model's generation stops: those of generation_config.json in the tokenizer's folder,
    and its end token."""
    stops = {tokenizer.eos_token} if isinstance(tokenizer.eos_token, str) else set()
    file = pathlib.Path(str(tokenizer.name_or_path)) / "generation_config.json"
    try:
        ids = token_ids(read_json(file).get("eos_token_id"), str(file))
    except UserError:  # reported where the ids are needed
        ids = []
    for id_ in ids:
        token = tokenizer.added_tokens_decoder.get(id_)
        if token is not None:
            stops.add(token.content)
    return frozenset(stops)


def template_error(problem: Exception, *, where: str, fix: str | None = None) -> UserError:
    """A template's failure as a UserError with the template's own message."""
    if isinstance(problem, TemplateLimitError):
        return TemplateLimitError(problem.what, where=where, fix=problem.fix)
    message = str(problem) or type(problem).__name__
    line = getattr(problem, "lineno", None)
    if line:
        message = f"{message} (line {line} of the template)"
    if isinstance(problem, jinja2.TemplateSyntaxError):
        return UserError(
            f"the chat template is not valid Jinja: {message}", where=where, fix="correct model.chat_template"
        )
    return UserError(
        f"the chat template cannot render this conversation: {message}",
        where=where,
        fix=fix
        or "change the record, set model.chat_template to one that allows it, or set data.on_bad=skip to leave it out",
    )


def as_dicts(conversation: Conversation) -> list[dict[str, object]]:
    """The messages in OpenAI's form, which chat templates read."""
    return [as_dict(message) for message in conversation.messages]
