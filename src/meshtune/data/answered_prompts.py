"""The prompts of documents that have answers, which a student of distillation answers itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from meshtune.data.pictures.expansion import picture_rows, read_pictures
from meshtune.data.store import Store
from meshtune.data.tokens import Example
from meshtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class AnsweredPrompts:
    """The prompts of tokenised documents, each up to its last answer, and these answers.

    Documents without a prompt, and those whose prompt has more than `longest` tokens, are left out. The `lengths` int64
    are those of the prompts. Raises: UserError if none is left.
    """

    def __init__(self, store: Store, longest: int, tokenizer: PreTrainedTokenizerFast):
        starts, stops = np.array(
            [_last_answer(example.weights) for example in map(store.__getitem__, range(len(store)))]
        ).T
        self._places = np.flatnonzero((starts > 0) & (starts <= longest))
        if not len(self._places):
            raise UserError(
                f"no document has a prompt of at most {longest} tokens before an answer, which the student could "
                "complete",
                where="data.train, rollout",
                fix="give conversations, raise data.max_length, or lower rollout.max_tokens",
            )
        self.lengths, self._stops = starts[self._places], stops[self._places]
        self._store, self._tokenizer = store, tokenizer
        self.path, self.damage, self.digests = store.path, store.damage, store.digests[self._places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Example:
        example, stop = self._store[int(self._places[index])], self.lengths[index]
        text = self._tokenizer.decode(example.ids[:stop])
        extra: dict[str, object] = {"prompt": text, "columns": {}}
        if example.extra:
            extra["pictures"] = picture_rows([item for item in read_pictures(example.extra) if item.start < stop])
        data = json.dumps(extra, ensure_ascii=False).encode()
        return Example(example.ids[:stop], example.weights[:stop], example.origin, extra=data)

    def answer(self, index: int) -> np.ndarray:
        """The ids of the answer to a prompt."""
        return self._store[int(self._places[index])].ids[self.lengths[index] : self._stops[index]]


def _last_answer(weights: np.ndarray) -> tuple[int, int]:
    """Where the last run of trained tokens begins and ends; (0, 0) where there is none."""
    trained = np.flatnonzero(weights)
    if not len(trained):
        return 0, 0
    gaps = np.flatnonzero(np.diff(trained) > 1)
    return int(trained[gaps[-1] + 1] if len(gaps) else trained[0]), int(trained[-1]) + 1
