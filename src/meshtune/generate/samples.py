"""Text from parameters in memory, to see between two steps of a run what it learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtune.arrays.tree import Tree
from meshtune.generate.config import Sampling
from meshtune.generate.engine import Engine
from meshtune.generate.prompts import chat_ids, continuation_ids, tokenizer_end, turn_end
from meshtune.generate.text import pieces
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def sample(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    chat: bool,
    system: str | None = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: frozenset[int] = frozenset(),
) -> list[str]:
    """Generates the answers to `prompts` (`chat`: messages of a user) or their continuations.

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
        ids = [chat_ids(tokenizer, [*before, {"role": "user", "content": prompt}]) for prompt in prompts]
        turn_ids, strings = turn_end(tokenizer)
        stop_ids |= turn_ids
    else:
        ids = [continuation_ids(tokenizer, prompt) for prompt in prompts]
    engine = Engine(params, spec, compute, stop_ids)
    room = engine.context - max(map(len, ids))
    rows = pieces(
        engine,
        tokenizer,
        ids,
        Sampling(temperature=temperature, seed=seed),
        max_tokens=max(1, min(max_tokens, room)),
        stop=strings,
        continued=not chat,
    )
    return ["".join(texts) for texts in zip(*rows, strict=True)]
