"""`/v1/score/evaluation`: what a reward model says of texts, in the form of LLaMA-Factory's API."""

from __future__ import annotations

from meshtune.generate.prompts import chat_template
from meshtune.generate.request import check_prompt
from meshtune.serve.errors import ApiError
from meshtune.serve.models import Served
from meshtune.serve.schema import ChatMessage, ScoreRequest


def tokenize_texts(request: ScoreRequest, served: Served) -> list[tuple[int, ...]]:
    """The ids of each text or conversation.

    Raises ApiError for a model that gives no scores, UserError for a text that is empty or longer than the context.
    """
    model = served.model
    if not model.spec.scored:
        raise ApiError(400, f"'{served.id}' is no reward model: it writes texts, and gives no scores", param="model")
    several = []
    for n, entry in enumerate(request.messages):
        where = f"messages[{n}]"
        ids = _ids(served, entry, where)
        several.append(check_prompt(ids, model.spec.vocab, model.engine.context + 1, where))
    return several


def score_rows(rows: list[tuple[int, ...]], served: Served) -> list[float]:
    """The score of each text: that of its last token."""
    return [float(served.model.logits(row)[0, -1, 0]) for row in rows]


def _ids(served: Served, entry: str | list[ChatMessage], where: str) -> list[int]:
    tokenizer = served.model.tokenizer
    if isinstance(entry, str):
        served.check_text(entry, where)
        return list(tokenizer(entry)["input_ids"])  # pyright: ignore[reportArgumentType]
    messages = [message.rendered(f"{where}[{n}]") for n, message in enumerate(entry)]
    chat = chat_template(tokenizer)
    try:
        text = chat.render(messages)
    except chat.failures as problem:
        raise ApiError(400, f"the chat template cannot render this: {problem}", param=where) from problem
    served.check_text(text, where)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore[reportArgumentType]
