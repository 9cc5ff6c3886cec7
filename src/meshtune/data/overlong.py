"""Cuts a document that is longer than a row turn by turn, as LLaMA-Factory does (its `infer_seqlen`)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def positions_by_turns(
    answers: np.ndarray, max_length: int, *, longest: int | None = None, last_turn_first: bool = False
) -> np.ndarray:
    """The positions of a document that are left when prompt and answer of each turn lose their ends, int64 [kept].

    `answers` int [turns, 2] are the first position of each answer and the one after its last; what precedes an answer
    is its prompt. Turns take room in their order, or with `last_turn_first` from the end, until none is left. `longest`
    is the length of the longer answer of a pair, whose two documents keep the same part of their prompt.
    """
    starts = np.concatenate([[0], answers[:-1, 1]])
    turns: Iterable[tuple[int, int, int]] = zip(starts.tolist(), *answers.T.tolist(), strict=True)
    if last_turn_first:
        turns = reversed(list(turns))
    room, positions = max_length, list[np.ndarray]()
    for start, answer, end in turns:
        if room <= 0:
            break
        prompt_length, answer_length = _lengths(answer - start, longest or end - answer, room)
        positions.append(np.arange(start, start + prompt_length))
        positions.append(np.arange(answer, min(answer + answer_length, end)))
        room -= prompt_length + answer_length
    return np.sort(np.concatenate(positions))


def _lengths(prompt: int, answer: int, room: int) -> tuple[int, int]:
    """The tokens that prompt and answer keep. One that is shorter than half the room is left whole."""
    if answer * 2 < room:
        limit = room
    elif prompt * 2 < room:
        limit = room - prompt
    else:
        limit = int(room * (answer / (prompt + answer)))
    answer = min(limit, answer)
    return min(max(room - answer, 0), prompt), answer
