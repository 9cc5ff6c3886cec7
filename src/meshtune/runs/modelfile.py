"""Ollama's Modelfile (https://github.com/ollama/ollama/blob/main/docs/modelfile.md) of a GGUF file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from meshtune.data.chat import ChatTemplate, CompiledTemplate
from meshtune.data.tokenizer import chat_templates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]
ROLES = ("system", "user", "assistant")
MARKS = {role: f"<~{role}~>" for role in ROLES}


@dataclasses.dataclass(frozen=True)
class Turns:
    """A chat template that writes every message alike: (text before, text after) by role, and what opens an answer.

    `start` is what the template writes first where a conversation has no system message. With `system_in`, a system
    message is put at the beginning of the first or the last message if that is a user's, and `start` before all.
    """

    delimiters: dict[str, tuple[str, str]]
    opening: str
    start: str = ""
    system_in: Literal["first", "last"] | None = None

    def text(self, messages: Sequence[Message], opened: bool) -> str:
        """A conversation as the template writes it."""
        system, written = "", self.start
        if messages[0]["role"] == "system":
            system = messages[0]["content"].join(self.delimiters["system"])
            messages = messages[1:]
            if self.system_in is None:
                written, system = system, ""
        place = 0 if self.system_in == "first" else len(messages) - 1
        for number, message in enumerate(messages):
            before, after = self.delimiters[message["role"]]
            within = system if number == place and message["role"] == "user" else ""
            written += before + within + message["content"] + after
        return written + (self.opening if opened else "")


def modelfile(sources: Sequence[str], tokenizer: PreTrainedTokenizerFast, stops: Sequence[str]) -> str:
    """The text of a Modelfile: `sources` (FROM, ADAPTER), the template in Ollama's language where it can be said
    there, and at which texts an answer ends."""
    lines = list(sources)
    templates = chat_templates(tokenizer)
    template = templates.get("default", "")
    turns = turns_of(tokenizer)
    if turns is not None:
        render = _render_of(tokenizer)
        if "strftime_now" in template:
            lines.append("# The chat template writes the day's date; this TEMPLATE has that of the day it was written.")
        if render(*_SPACED) != turns.text(*_SPACED):
            lines.append(
                "# The chat template removes spaces and line breaks around messages; Ollama's language cannot."
            )
        if any("tools" in text for text in templates.values()):
            lines.append(
                "# The chat template writes tools, this TEMPLATE does not: Ollama will refuse requests with tools."
            )
        lines.append(f'TEMPLATE """{_go_template(turns)}"""')
    elif templates:
        lines.append(
            "# The chat template writes messages in ways that a TEMPLATE of Ollama's cannot say in general: Ollama"
        )
        lines.append(
            "# uses its own for models that it knows by the template in the GGUF file; else write a TEMPLATE here."
        )
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    return "\n".join(lines) + "\n"


def turns_of(tokenizer: PreTrainedTokenizerFast) -> Turns | None:
    """How a chat template writes messages; None where it depends on more than their roles."""
    if "default" not in chat_templates(tokenizer):
        return None
    render = _render_of(tokenizer)
    try:
        probes = [(render(*probe), probe) for probe in _PROBES]
        candidates = _candidates(render)
    except ChatTemplate.failures:  # it refuses one of the conversations
        return None
    agree = (turns for turns in candidates if all(turns.text(*probe) == text for text, probe in probes))
    turns = next(agree, None)
    if turns is None:
        return None
    parts = [text for pair in turns.delimiters.values() for text in pair] + [turns.opening, turns.start]
    return turns if all(_can_be_said(part) for part in parts) else None


def _render_of(tokenizer: PreTrainedTokenizerFast) -> Render:
    """The chat template, without the token that begins a text where the tokenizer adds it by itself: then Ollama's
    llama.cpp does so too."""
    begins = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    bos = str(tokenizer.bos_token) if begins else ""

    template = CompiledTemplate(tokenizer, str(tokenizer.get_chat_template()))

    def render(messages: Sequence[Message], opened: bool) -> str:
        return template.render(messages, generation_prompt=opened).removeprefix(bos)

    return render


def _can_be_said(part: str) -> bool:
    """Whether a text may be part of a TEMPLATE: Ollama leaves out what cannot be printed, but for spaces."""
    return "{{" not in part and '"""' not in part and all(c.isprintable() or c in "\t\n\r" for c in part)


def _conversation(*roles: str, **contents: str) -> list[Message]:
    return [{"role": role, "content": contents.get(role, MARKS[role])} for role in roles]


_PROBES = (
    (_conversation("user"), True),
    (_conversation("system", "user"), True),
    (_conversation("user", "assistant", "user"), True),
    (_conversation("system", "user", "assistant", "user"), True),
    (_conversation("system", "user", "assistant", "user", "assistant"), False),
    # Switches within a system message, which some templates read.
    (_conversation("system", "user", system="/no_think"), True),
    # What a model that thinks has said comes back as it was, which templates of such models often cut.
    (_conversation("user", "assistant", "user", assistant="<think>\nWhy?\n</think>\n\nThis."), True),
)
_SPACED = (_conversation("user", user=" a question \n"), True)


def _candidates(render: Render) -> list[Turns]:
    """The ways in which a template may write messages, by what each further message adds."""
    question = render(_conversation("user"), False)
    answered = render(_conversation("user", "assistant"), False)
    twice = render(_conversation("user", "assistant", "user"), False)
    start, mark, after_user = question.partition(MARKS["user"])
    opened = render(_conversation("user"), True)
    if not mark or not all(text.startswith(question) for text in (answered, twice, opened)):
        return []
    before_assistant, _, after_assistant = answered.removeprefix(question).partition(MARKS["assistant"])
    before_user, mark, last = twice.removeprefix(answered).partition(MARKS["user"])
    if not twice.startswith(answered) or not mark or last != after_user or not start.endswith(before_user):
        return []
    before_system, _, remaining = render(_conversation("system", "user"), False).partition(MARKS["system"])
    after_system = remaining.partition(MARKS["user"])[0]
    delimiters = {"user": (before_user, after_user), "assistant": (before_assistant, after_assistant)}
    opening = opened.removeprefix(question)
    # A turn of its own, or within a user's message.
    if after_system.endswith(before_user):
        system = (before_system, after_system.removesuffix(before_user))
        return [Turns({"system": system, **delimiters}, opening, start.removesuffix(before_user))]
    within = {"system": (before_system.removeprefix(start), after_system), **delimiters}
    return [Turns(within, opening, start.removesuffix(before_user), place) for place in ("first", "last")]


def _go_template(turns: Turns) -> str:
    """A template in Go's language over what Ollama gives it: `.Messages` of `.Role` and `.Content`, and `.System`."""
    before, after = turns.delimiters["system"]
    system, loop = "", "range .Messages"
    branches = {}
    if turns.system_in is None:
        branches["system"] = f"{before}{{{{ .Content }}}}{after}"
    else:
        loop = "range $index, $_ := .Messages"
        place = "(eq (len (slice $.Messages $index)) 1)"
        if turns.system_in == "first":
            place = '(or (eq $index 0) (and (eq $index 1) (eq (index $.Messages 0).Role "system")))'
        system = f"{{{{ if and $.System {place} }}}}{before}{{{{ $.System }}}}{after}{{{{ end }}}}"
    for role in ("user", "assistant"):
        before, after = turns.delimiters[role]
        branches[role] = f"{before}{system if role == 'user' else ''}{{{{ .Content }}}}{after}"
    choice = "else ".join(f'if eq .Role "{role}" }}}}{text}{{{{ ' for role, text in branches.items())
    messages = f"{{{{ {loop} }}}}{{{{ {choice}end }}}}{{{{ end }}}}"
    start = turns.start
    if start and turns.system_in is None:
        first = '{{ if and (eq $index 0) (ne .Role "system") }}'
        start = f"{{{{ range $index, $_ := .Messages }}}}{first}{start}{{{{ end }}}}{{{{ end }}}}"
    return f"{start}{messages}{turns.opening}"
