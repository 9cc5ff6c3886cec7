"""Text around an engine: prompts to token ids, and new tokens to text that grows."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from meshtune.arrays.tree import Tree
from meshtune.data.chat import ChatTemplate, template_error
from meshtune.errors import UserError, nearest
from meshtune.generate.engine import Engine
from meshtune.generate.pictures import TokenPrompt, insert_pictures, load_picture, split_pictures, text_only
from meshtune.generate.programs import STEPS
from meshtune.generate.request import Sampling
from meshtune.generate.scheduler import Scheduler
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.runs.sources import Source
from meshtune.weights.ends import read_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from meshtune.data.pictures.reader import PictureReader

ROLES = ("system", "user", "assistant", "tool")
ChatMessage = Mapping[str, object]


def continuation_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of a text to continue, with the special tokens the tokenizer begins a text with.

    Raises UserError if there are none.
    """
    ids: list[int] = tokenizer(text)["input_ids"]  # pyright: ignore[reportAssignmentType]
    # Some tokenizers end every text with their end token; a text that has ended is not continued.
    while text and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token)):
        ids.pop()
    if not ids:
        raise UserError("the prompt is empty", fix="give some text to continue")
    return ids


def chat_ids(tokenizer: PreTrainedTokenizerFast, messages: Sequence[ChatMessage]) -> list[int]:
    """The ids of a conversation, rendered by the chat template and ready for the assistant's answer.

    Raises UserError for a tokenizer without a chat template, messages that are none, and what the template refuses.
    """
    _check(messages)
    return encoded_chat(tokenizer, chat_text(tokenizer, messages))


def chat_prompt(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[ChatMessage], reader: PictureReader | None = None
) -> TokenPrompt:
    """The same of a conversation that may have pictures, which `reader` reads for the model; None: it reads text only.

    Raises UserError as `chat_ids`, `load_picture` and `insert_pictures` do.
    """
    plain, pictures = split_pictures(messages)
    if reader is None:
        if pictures:
            raise text_only()
        return TokenPrompt(chat_ids(tokenizer, plain))
    _check(plain)
    return picture_prompt(tokenizer, chat_text(tokenizer, plain, reader=reader), pictures, reader)


def picture_prompt(
    tokenizer: PreTrainedTokenizerFast, text: str, pictures: Sequence[object], reader: PictureReader
) -> TokenPrompt:
    """A conversation that was rendered, as a prompt with these pictures. Raises UserError as `chat_prompt` does."""
    names = [f"picture {n}" for n in range(len(pictures))] if len(pictures) > 1 else ["picture"]
    loaded = [load_picture(reader, picture, where) for picture, where in zip(pictures, names, strict=False)]
    return insert_pictures(reader, encoded_chat(tokenizer, text), loaded)


def chat_text(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, object]] = (),
    options: Mapping[str, object] | None = None,
    reader: PictureReader | None = None,
) -> str:
    """A conversation with `tools` as its chat template renders it, ready for the assistant's answer; `options` are
    variables of the template, and `reader` reads pictures for the model. The messages have known roles and contents.
    Raises UserError for the rest as `chat_ids`."""
    chat = chat_template(tokenizer, reader)
    if messages[-1]["role"] == "assistant":
        problem = "the conversation ends with the assistant's words, so there is nothing to answer"
        raise UserError(problem, where=f"message {len(messages) - 1}", fix="end with a message of the user")
    try:
        return chat.render(chat.adapt(messages), tools, generation_prompt=True, options=options)
    except chat.failures as problem:
        raise _rendering_error(tokenizer, problem) from problem


def _rendering_error(tokenizer: PreTrainedTokenizerFast, problem: Exception) -> UserError:
    error = template_error(problem, where=str(tokenizer.name_or_path))
    return UserError(error.what, where=error.where, fix="change the conversation, or give another chat_template")


def encoded_chat(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of a conversation that was rendered. Raises UserError if there are none."""
    # The template writes the special tokens itself.
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    if not ids:
        raise UserError("the chat template renders this conversation to nothing", where=str(tokenizer.name_or_path))
    return ids


def chat_template(tokenizer: PreTrainedTokenizerFast, reader: PictureReader | None = None) -> ChatTemplate:
    """The tokenizer's chat template. Raises UserError if it has none."""
    if not tokenizer.chat_template:
        raise _no_template_error(tokenizer)
    return _measured_once(tokenizer, str(tokenizer.chat_template), reader)


def _no_template_error(tokenizer: PreTrainedTokenizerFast) -> UserError:
    return UserError(
        "the tokenizer has no chat template, so this model cannot chat",
        where=str(tokenizer.name_or_path),
        fix="use generate with plain text (`meshtune generate`, Model.generate('...')), or give a chat_template: "
        "'plain' suits any base model",
    )


@functools.lru_cache(maxsize=8)
def _measured_once(tokenizer: PreTrainedTokenizerFast, template: str, reader: PictureReader | None) -> ChatTemplate:
    return ChatTemplate(tokenizer, reader)


def turn_end(tokenizer: PreTrainedTokenizerFast) -> tuple[frozenset[int], tuple[str, ...]]:
    """(token ids, strings) that end an assistant's turn in the chat template."""
    end = chat_template(tokenizer).end_of_turn
    if end.token is not None:
        return frozenset({end.token}), ()
    return frozenset(), ((end.head.strip(),) if end.head.strip() else ())


def text_end(source: Source, tokenizer: PreTrainedTokenizerFast | None) -> frozenset[int]:
    """Ids that end any text: those that the files of the base and of the adapter name, and the tokenizer's own."""
    ids = frozenset(read_ends(source.base, source.adapter))
    return ids if tokenizer is None else ids | tokenizer_end(tokenizer)


def tokenizer_end(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """The id of the tokenizer's end token, if it has one."""
    end = tokenizer.eos_token_id
    return frozenset({end}) if isinstance(end, int) else frozenset()


def _check(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise UserError(
            "the conversation is empty", fix="give at least one message: {'role': 'user', 'content': '...'}"
        )
    for number, message in enumerate(messages):
        where = f"message {number}"
        role = message.get("role")
        if role not in ROLES:
            hint = nearest(str(role), ROLES)
            raise UserError(f"role {role!r} is unknown", where=where, fix=f"{hint}give one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str | list):
            raise UserError("a message needs its words as a string", where=f"{where}, field content")


UNFINISHED = "�"  # what decoding gives for the first bytes of a character whose last are yet to come
CONTEXT = 8  # tokens of the prompt that decide how the first new token is written
CHARACTER = 4  # bytes, and so tokens, of a character at most


class Detokenizer:
    """Turns new token ids into text, special tokens left out.

    A token is decoded together with the ones before it, because its text depends on them: sentencepiece-like
    tokenizers drop the space of a text's first word, and a character may be spread over several tokens. With `before`
    the text continues those tokens; without, it begins. Special tokens that are `visible` are written too.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = (), visible: frozenset[int] = frozenset()
    ):
        self._tokenizer = tokenizer
        self._hidden = special_ids(tokenizer) - visible if visible else None
        self._ids: list[int] = []
        self._start, self._shown = 0, 0
        self.unfinished = False  # whether the newest tokens are the first bytes of a character
        if before:
            self._continue(before)

    def _continue(self, before: Sequence[int]) -> None:
        # Not from the middle of a character, which would spoil those that follow it.
        width = CONTEXT
        while width < len(before) and UNFINISHED in self._decode(list(before[-width:])):
            width *= 2
        self._ids = list(before[-width:])
        self._shown = len(self._ids)
        for end in range(len(self._ids), max(0, len(self._ids) - CHARACTER), -1):
            if not self._decode(self._ids[:end]).endswith(
                UNFINISHED
            ):  # a character that the prompt begins is shown whole
                self._shown = end
                break

    @property
    def unshown(self) -> int:
        """The number of newest tokens that no text was given for."""
        return len(self._ids) - self._shown

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._ids.extend(ids)
        return self._new_text(flush=False)

    def finish(self) -> str:
        """The text that was held back, when no more tokens come."""
        return self._new_text(flush=True)

    def _new_text(self, flush: bool) -> str:
        shown = self._decode(self._ids[self._start : self._shown])
        for end in range(len(self._ids), max(self._shown, len(self._ids) - CHARACTER), -1):
            text = self._decode(self._ids[self._start : end])
            is_complete = flush or not text.endswith(UNFINISHED) or len(text) <= len(shown)
            if end == len(self._ids):
                self.unfinished = not is_complete
            if is_complete:  # without a last character that is yet to be finished
                return self._show(text, shown, end)
        if self.unshown > 4 * CHARACTER:  # bytes that are no text, but for the last ones
            end = len(self._ids) - CHARACTER
            return self._show(self._decode(self._ids[self._start : end]), shown, end)
        return ""

    def _show(self, text: str, shown: str, end: int) -> str:
        if len(text) <= len(shown):
            return ""
        self._start, self._shown = self._shown, end
        return text[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        if self._hidden is not None:
            ids = [id_ for id_ in ids if id_ not in self._hidden]
        text = self._tokenizer.decode(ids, skip_special_tokens=self._hidden is None, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class TokenBytes:
    """The bytes of each token by itself, with its space; those of a part of a character are not text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def __getitem__(self, id_: int) -> bytes:
        if id_ not in self._known:
            self._known[id_] = self._read(id_)
        return self._known[id_]

    def _read(self, id_: int) -> bytes:
        added = self._tokenizer.added_tokens_decoder.get(id_)
        if added is not None:
            return added.content.encode()
        token = self._tokenizer.convert_ids_to_tokens(id_)
        if not isinstance(token, str):  # an id that the model has and the tokenizer lacks
            return b""
        if "ByteLevel" in self._decoders:
            if all(character in self._byte_of for character in token):
                return bytes(self._byte_of[character] for character in token)
            return token.encode()
        if "ByteFallback" in self._decoders and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        if self._decoders & {"Metaspace", "Replace"}:
            return token.replace("▁", " ").encode()
        return str(self._tokenizer.decode([id_])).encode()

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of steps that turn tokens into text."""
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        form = {} if decoder is None else json.loads(decoder.__getstate__())
        return frozenset(step["type"] for step in form.get("decoders", [form]) if "type" in step)

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The bytes behind GPT-2's visible characters: those that are none begin at U+0100."""
        visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in visible]
        return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


class Place(NamedTuple):
    """The bytes of a token in its text (None: the text does not show it), and the character that they begin in. A token
    that `begins` a text has nothing before it."""

    content: bytes | None
    offset: int
    begins: bool


class Alignment:
    """Text that grows token by token, with the place of each token in it.

    The bytes of all tokens, joined, are the text's, as long as the text is whole characters.
    """

    def __init__(self, decoder: Detokenizer, token_bytes: TokenBytes, hidden: frozenset[int], continued: bool):
        self._decoder, self._bytes, self._hidden, self._continued = decoder, token_bytes, hidden, continued
        self._pending: list[int] = []
        self.length = 0

    def push(self, id_: int) -> tuple[str, list[Place]]:
        """The text that a token completes, and the places of the tokens that it is of."""
        self._pending.append(id_)
        text = self._decoder.push([id_])
        if text:
            count = len(self._pending) - self._decoder.unshown
            return text, self._places(text, max(1, count))
        return text, [] if self._decoder.unfinished else self._places(text, len(self._pending))

    def finish(self) -> tuple[str, list[Place]]:
        """The text that was held back, when no more tokens come."""
        text = self._decoder.finish()
        return text, self._places(text, len(self._pending))

    def _places(self, text: str, count: int) -> list[Place]:
        ids, self._pending = self._pending[:count], self._pending[count:]
        shown, content = [id_ for id_ in ids if id_ not in self._hidden], text.encode()
        parts = [self._bytes[id_] for id_ in shown]
        if shown and content.startswith(
            before := b"".join(parts[:-1])
        ):  # a space may be gone, at the beginning of a text
            parts[-1] = content[len(before) :]
        places, before = [], b""
        for id_ in ids:
            part = None if id_ in self._hidden else parts.pop(0)
            characters = sum(byte & 0xC0 != 0x80 for byte in before)
            within = bool(before and part and part[0] & 0xC0 == 0x80)
            offset = self.length + min(max(0, characters - within), len(text))
            places.append(Place(part, offset, not self._continued and offset == 0))
            before += part or b""
        for number in range(len(places) - 2, -1, -1):  # a hidden token between the bytes of a character is within it
            later = places[number + 1].offset
            places[number] = places[number]._replace(offset=min(places[number].offset, later))
        self.length += len(text)
        return places


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of all tokens that are left out of decoded text."""
    return frozenset(id_ for id_, added in tokenizer.added_tokens_decoder.items() if added.special)


class StopStrings:
    """Ends a text before the first of some strings; holds back what may be the beginning of one. Raises UserError for
    an empty string."""

    def __init__(self, strings: Sequence[str]):
        if "" in strings:
            raise UserError("a stop string is empty", where="stop", fix="leave it out")
        self._strings, self._held, self.found = strings, "", False

    def push(self, text: str) -> str:
        """The text that is safe to show."""
        return self._push(text) if self._strings else text

    def _push(self, text: str) -> str:
        if self.found:
            return ""
        text = self._held + text
        at = min((i for i in map(text.find, self._strings) if i >= 0), default=None)
        if at is not None:
            self.found, self._held = True, ""
            return text[:at]
        keep = max((overlap(text, string) for string in self._strings), default=0)
        shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return shown

    def finish(self) -> str:
        """The text that was held back, when no more comes."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` that `string` begins with, `string` itself aside."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if string.startswith(text[-n:])), 0)


def pieces(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[TokenPrompt],
    sampling: Sampling,
    *,
    max_tokens: int | None,
    stop: Sequence[str] = (),
    stop_ids: frozenset[int] | None = None,
    continued: bool = True,
    steps: int = STEPS,
    scheduler: Scheduler | None = None,
) -> Iterator[list[str]]:
    """Generates, and yields each prompt's new text piece by piece; joined, a prompt's pieces are its whole answer.

    `continued` writes the answer as the prompt's continuation, else as a text that begins (a turn of a chat).
    Raises UserError as Engine.run and StopStrings do, before anything is computed.
    """
    run = engine.run(
        [prompt.ids for prompt in prompts],
        sampling,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        pictures=[prompt.pictures for prompt in prompts],
        steps=steps,
        scheduler=scheduler,
    )
    rows = [(Detokenizer(tokenizer, prompt.ids if continued else ()), StopStrings(stop)) for prompt in prompts]

    def texts() -> Iterator[list[str]]:
        for piece in run:
            shown = [ends.push(decoder.push(ids)) for ids, (decoder, ends) in zip(piece, rows, strict=True)]
            for number, (_, ends) in enumerate(rows):
                if ends.found:
                    run.stop(number)
            yield shown
        yield [ends.push(decoder.finish()) + ends.finish() for decoder, ends in rows]

    return texts()


def sample(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Any],
    *,
    chat: bool,
    system: str | None = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    reader: PictureReader | None = None,
) -> list[str]:
    """Generates the answers to `prompts` (`chat`: messages of a user, or their content parts) or their continuations.

    `params` is the whole tree, adapters in place; nothing of it is copied. The same prompts compile once a process,
    whatever the parameters' values. max_tokens is cut to what the context has room for. `stop_ids` end a text,
    as do the tokenizer's end token and, in a chat, the template's end of turn.
    Raises UserError for an empty or over-long prompt, and for a chat without a chat template.
    """
    if not prompts:
        return []
    compute = dataclasses.replace(compute, remat="none", attention="auto")
    stop_ids = stop_ids | tokenizer_end(tokenizer)
    strings: tuple[str, ...] = ()
    if chat:
        before = [{"role": "system", "content": system}] if system else []
        read = [chat_prompt(tokenizer, [*before, {"role": "user", "content": prompt}], reader) for prompt in prompts]
        turn_ids, strings = turn_end(tokenizer)
        stop_ids |= turn_ids
    else:
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise UserError(
                "a prompt has parts, and the model is tuned on text without a chat template",
                where="sample.prompts",
                fix="write it as text",
            )
        read = [TokenPrompt(continuation_ids(tokenizer, prompt)) for prompt in prompts]
    engine = Engine(params, spec, compute, stop_ids)
    room = engine.context - max(len(prompt.ids) for prompt in read)
    rows = pieces(
        engine,
        tokenizer,
        read,
        Sampling(temperature=temperature, seed=seed),
        max_tokens=max(1, min(max_tokens, room)),
        stop=strings,
        continued=not chat,
    )
    return ["".join(texts) for texts in zip(*rows, strict=True)]
