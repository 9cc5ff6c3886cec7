"""Adds the recipe's system prompt to conversations that have none."""

from __future__ import annotations

import dataclasses

from meshtune.data.conversation import Conversation, Document, Labelled, Message, Pair, Sample


def add_system(sample: Sample, system: str) -> Sample:
    """The sample with `system` before every conversation that has no system turn."""
    match sample:
        case Pair():
            chosen, rejected = (_add_to(document, system) for document in (sample.chosen, sample.rejected))
            return dataclasses.replace(sample, chosen=chosen, rejected=rejected)
        case Labelled():
            return dataclasses.replace(sample, document=_add_to(sample.document, system))
        case _:
            return _add_to(sample, system)


def _add_to(document: Document, system: str) -> Document:
    if not isinstance(document, Conversation):
        return dataclasses.replace(document, system_prompt=system)
    if any(message.role == "system" for message in document.messages):
        return document
    return dataclasses.replace(document, messages=(Message("system", system), *document.messages))
