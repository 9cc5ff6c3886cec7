"""Ollama's Modelfile (https://github.com/ollama/ollama/blob/main/docs/modelfile.md) of a GGUF file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]
ROLES = ("system", "user", "assistant")
MARKS = {role: f"<~{role}~>" for role in ROLES}


@dataclasses.dataclass(frozen=True)
class Turns:
    """A chat template that writes every message alike: (text before, text after) by role, and what opens an answer.

    `default_system` is the system message that the template adds where a conversation has none.
    """

    around: dict[str, tuple[str, str]]
    opening: str
    default_system: str | None = None

    def text(self, messages: Sequence[Message], opened: bool) -> str:
        if self.default_system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default_system}, *messages]
        turns = (self.around[m["role"]][0] + m["content"] + self.around[m["role"]][1] for m in messages)
        return "".join(turns) + (self.opening if opened else "")


def modelfile(sources: Sequence[str], tokenizer: PreTrainedTokenizerFast, stops: Sequence[str]) -> str:
    """The text of a Modelfile: `sources` (FROM, ADAPTER), the template in Ollama's language where it can be said
    there, and at which texts an answer ends."""
    lines = list(sources)
    turns = turns_of(tokenizer) if isinstance(tokenizer.chat_template, str) else None
    if turns is not None:
        lines.append(f'TEMPLATE """{_go_template(turns)}"""')
        if turns.default_system is not None:
            lines.append(f'SYSTEM """{turns.default_system}"""')
    elif tokenizer.chat_template:
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
    begins = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]  # by itself: then llama.cpp does so too
    bos = str(tokenizer.bos_token) if begins else ""

    def render(messages: Sequence[Message], opened: bool) -> str:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opened)
        assert isinstance(text, str)
        return text.removeprefix(bos)

    try:
        turns = _turns(render)
        agree = turns is not None and all(
            turns.text(conversation, opened) == render(conversation, opened) for conversation, opened in _PROBES
        )
    except Exception:  # a template may refuse a conversation in its own words
        return None
    parts = [text for pair in turns.around.values() for text in pair] + [turns.opening] if turns else []
    return turns if agree and not any("{{" in part or '"""' in part for part in parts) else None


def _said(*roles: str) -> list[Message]:
    return [{"role": role, "content": MARKS[role]} for role in roles]


_PROBES = (
    (_said("system", "user"), True),
    (_said("user", "assistant", "user"), True),
    (_said("system", "user", "assistant", "user", "assistant"), False),
)


def _turns(render: Render) -> Turns | None:
    """The texts around messages, by what each further message adds."""
    system = render(_said("system", "user"), False)
    before, _, rest = system.partition(MARKS["system"])
    between, _, after_user = rest.partition(MARKS["user"])
    twice = render(_said("system", "user", "assistant", "user"), False)
    if not twice.startswith(system):
        return None
    before_assistant, _, rest = twice.removeprefix(system).partition(MARKS["assistant"])
    middle, _, last = rest.partition(MARKS["user"])
    if last != after_user:
        return None
    # What stands between two messages ends the first, mostly as a user's message ends, and begins the second.
    alike = after_user and between.startswith(after_user) and middle.startswith(after_user)
    common = _common_ending(between, middle)
    if alike:
        common = _common_ending(between.removeprefix(after_user), middle.removeprefix(after_user))
    opening = render(_said("user"), True).removeprefix(render(_said("user"), False))
    around = {
        "system": (before, between.removesuffix(common)),
        "user": (common, after_user),
        "assistant": (before_assistant, middle.removesuffix(common)),
    }
    alone = render(_said("user"), False)
    default = alone.partition(common + MARKS["user"])[0]
    if not default:
        return Turns(around, opening)
    start, end = around["system"]
    if default.startswith(start) and default.endswith(end):
        return Turns(around, opening, default.removeprefix(start).removesuffix(end))
    return None


def _common_ending(first: str, second: str) -> str:
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return first[len(first) - count :]


def _go_template(turns: Turns) -> str:
    branches = [
        f'{{{{ {"if" if number == 0 else "else if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        for number, (role, (before, after)) in enumerate(turns.around.items())
    ]
    return "{{ range .Messages }}" + "".join(branches) + "{{ end }}{{ end }}" + turns.opening
