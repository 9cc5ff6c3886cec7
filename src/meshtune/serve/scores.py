"""`/v1/score/evaluation`: what a reward model says of texts, in the form of LLaMA-Factory's API."""

from __future__ import annotations

from meshtune.generate.prompts import chat_template
from meshtune.generate.request import check_prompt
from meshtune.serve.errors import ApiError
from meshtune.serve.models import Served
from meshtune.serve.schema import Message, ScoreRequest

NAME, PREFIX = "score.evaluation", "scoreval"


def evaluated(request: ScoreRequest, served: Served) -> list[float]:
    """A score for each text or conversation: that of its last token.

    Raises ApiError for a model that gives none, UserError for a text that is empty or longer than the context.
    """
    model = served.model
    if not model.spec.scored:
        raise ApiError(400, f"'{served.id}' is no reward model: it writes texts, and gives no scores", param="model")
    rows = []
    for n, entry in enumerate(request.messages):
        where = f"messages[{n}]"
        ids = _ids(served, entry, where)
        rows.append(check_prompt(ids, model.spec.vocab, model.engine.context + 1, where))
    return [float(model.logits(row)[0, -1, 0]) for row in rows]


def _ids(served: Served, entry: str | list[Message], where: str) -> list[int]:
    tokenizer = served.model.tokenizer
    if isinstance(entry, str):
        return list(tokenizer(entry)["input_ids"])  # pyright: ignore[reportArgumentType]
    messages = [message.rendered(f"{where}[{n}]") for n, message in enumerate(entry)]
    chat = chat_template(tokenizer)
    try:
        text = chat.render(messages)
    except chat.failures as problem:
        raise ApiError(400, f"the chat template cannot render this: {problem}", param=where) from problem
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore[reportArgumentType]
