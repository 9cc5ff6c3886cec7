"""Loss masks of rendered conversations, found by rendering and comparing, never by searching for marker strings.

The text of an assistant turn that is trained on is what generation must emit: from the end of the generation prompt
(the rendering of all turns before with `add_generation_prompt`) through the end-of-turn token. Some templates render
earlier turns differently once later ones exist (Qwen3 drops old reasoning, Mistral moves the system prompt). The turn
is then located by rendering the conversation again with other content in its place and comparing the two texts, and
counted in `prompts_differ`.
"""

from __future__ import annotations

import dataclasses

from meshtune.config.data_options import LossPolicy
from meshtune.data.chat import ChatTemplate
from meshtune.data.conversation import Conversation
from meshtune.data.dialect import has_reasoning, with_reasoning
from meshtune.data.rendered import (
    Rendered,
    Turn,
    changed_part,
    check_calls_are_written,
    locate_turn,
    render_conversation,
)


@dataclasses.dataclass(frozen=True)
class MaskedText:
    """A text with loss weights: `spans` are disjoint, ordered (start, end, weight); elsewhere the weight is `default`.

    `answers` are the indices of the spans that are assistant turns. `prompts_differ` counts assistant turns whose
    prompt is rendered otherwise in generation, `unended` those without an end of turn after them.
    """

    text: str
    spans: tuple[tuple[int, int, float], ...]
    default: float = 0.0
    answers: tuple[int, ...] = ()
    prompts_differ: int = 0
    unended: int = 0


def mask_conversation(
    chat: ChatTemplate, conversation: Conversation, policy: LossPolicy = LossPolicy(), *, locate_all: bool = False
) -> MaskedText:
    """Renders a conversation and computes its loss mask.

    With `locate_all`, assistant turns that are not trained on have a span too.

    Raises UserError naming the record, with the template's own message where it cannot render the conversation, and
    where it leaves out words, tools, calls, results or reasoning of the record.
    """
    if any(map(has_reasoning, conversation.messages)):
        conversation = with_reasoning(
            conversation, policy.reasoning, chat.dialect if policy.reasoning == "template" else None
        )
    view = render_conversation(chat, conversation)
    text = view.text
    assistants = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
    trained = assistants[-1:] if policy.last_turn_only else assistants
    located = assistants if locate_all else trained
    spans, answers, floor, differ, unended = [], [], 0, 0, 0
    for index, message in enumerate(conversation.messages):
        if index in located:
            turn = locate_turn(view, index, floor)
            if not turn.ended:
                turn, text = _ended_by_next_role(view, text, turn, index)
            if message.tool_calls:
                check_calls_are_written(view, index, text[turn.start : turn.end])
            if policy.train_on_tail and turn.ended:
                turn = _with_tail(chat, text, turn)
            weight = 1.0 if message.weight is None else message.weight
            answers.append(len(spans))
            spans.append((turn.start, turn.end, weight if index in trained else 0.0))
            floor = turn.end
            differ += turn.differs and index in trained
            unended += not turn.ended and index in trained
        elif message.tool_calls:
            check_calls_are_written(view, index, text)
        elif message.role != "assistant" and message.weight is not None and not policy.last_turn_only:
            spans.append(_weighted_part(view, index, message.weight, floor))
            floor = spans[-1][1]
    return MaskedText(text, tuple(spans), float(policy.train_on_prompt), tuple(answers), differ, unended)


def _weighted_part(view: Rendered, index: int, weight: float, floor: int) -> tuple[int, int, float]:
    """The span of a message that is no answer and has a weight."""
    start, end = changed_part(view, index, {**view.messages[index], "content": None})
    return max(start, floor), max(end, floor), weight


def _with_tail(chat: ChatTemplate, text: str, turn: Turn) -> Turn:
    """The turn with what the template writes after its end."""
    tail = chat.end_of_turn.tail
    return dataclasses.replace(turn, end=turn.end + len(tail)) if text.startswith(tail, turn.end) else turn


def _ended_by_next_role(view: Rendered, text: str, turn: Turn, index: int) -> tuple[Turn, str]:
    """The turn with the token of the next one where models of this template stop at that, and the text.

    The text of a last turn gets that token, which generation would end with.
    """
    ending = view.chat.role_ends.get("tool" if view.conversation.messages[index].tool_calls else "user")
    if ending is None:
        return turn, text
    if index == len(view.messages) - 1 and not text[turn.end :].strip():
        text = text[: turn.end] + ending
    if not text.startswith(ending, turn.end):
        return turn, text
    return dataclasses.replace(turn, end=turn.end + len(ending), ended=True), text
