"""A reward model that scores completions: it reads packed rows of prompts with their completions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from meshtune.arrays.batch import empty_arrays
from meshtune.arrays.tree import Tree
from meshtune.config.data_options import LossPolicy, TokenOptions
from meshtune.config.load import load_recipe
from meshtune.data.conversation import Conversation, Document, Message, Origin, Text
from meshtune.data.packing import pack
from meshtune.data.tokens import Tokenize
from meshtune.digests import digest_files, digest_json
from meshtune.errors import UserError
from meshtune.generate.api import load_variants
from meshtune.generate.programs import length_bucket
from meshtune.json_text import read_json
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.objectives.rm import segment_scores
from meshtune.rollout.reward_functions import Completions, Prompt
from meshtune.runs.output import is_run, weights_digests
from meshtune.runs.sources import ADAPTER_CONFIG, find, split_state

ROWS = 4  # of a batch
ADAPTER_WEIGHTS = "adapter_model.safetensors"
LARGEST = 1 << 20  # tokens of a document where the model names no context


class RewardModel:
    """A loaded reward model. Raises UserError for a path that holds none."""

    def __init__(self, path: str, max_length: int | None = None):
        check_reward_model(path)
        source = find(path)
        self.model = load_variants({path: source}, rewards=True)[path]
        if not self.model.spec.scored:
            raise _not_a_reward_model(path)
        digests = weights_digests(source.base)
        if source.adapter is not None:
            files = digest_files(source.adapter, [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
            digests = [*digests, *(file.digest for file in files.values())]
        self.digest = digest_json(digests)
        self._where, self._length = path, max_length or self.model.spec.max_length or LARGEST
        options = TokenOptions(self._length, LossPolicy(last_turn_only=True), overlong="error")
        self._tokenize = Tokenize(self.model.tokenizer, options)
        self._scores = jax.jit(_scores, static_argnames=("spec", "compute"))

    def score(self, completions: Completions) -> np.ndarray:
        """The score of every completion, float64 [N]; NaN for an empty one whose template writes no end of a turn.

        Prompt and completion are tokenised as in training, and the score is read at the last token. Raises UserError
        for a text longer than the model's context, naming its record.
        """
        documents = [
            _document(prompt, completion, Origin(str(origin), number))
            for number, (prompt, completion, origin) in enumerate(
                zip(completions.prompts, completions.completions, completions.origins, strict=True)
            )
        ]
        scores = np.full(len(completions), np.nan)
        try:
            examples = list(self._tokenize.tokenise_each(documents, sides=1))
        except UserError as error:
            where = re.sub(r", record \d+$", "", error.where or "")  # the origin has the record already
            fix = "raise max_length of this reward, use a model with a longer context, or lower rollout.max_tokens"
            raise UserError(f"a reward model cannot read this: {error.what}", where=where, fix=fix) from error
        ids = {number: example.ids for number, example in enumerate(examples) if example is not None}
        for numbers, batch in _batches(ids):
            values = np.asarray(self._scores(self.model.params, self.model.spec, self.model.compute, batch))
            for row, documents_of_row in enumerate(numbers):
                scores[documents_of_row] = values[row, : len(documents_of_row)]
        if unfit := [origin for origin, value in zip(completions.origins, scores, strict=True) if np.isinf(value)]:
            raise UserError(
                "the reward model gives a score that is not finite", where=f"{unfit[0]}; {self._where}", fix="check it"
            )
        return scores


def _scores(params: Tree, spec: ModelSpec, compute: Compute, batch: Mapping[str, Array]) -> Float[Array, "B S"]:
    return segment_scores(params, spec, compute, dict(batch), None)[0]


def _batches(ids: Mapping[int, np.ndarray]) -> Iterator[tuple[list[np.ndarray], dict[str, np.ndarray]]]:
    """The documents of each row of a batch, and the batch: packed rows of the length of the longest document."""
    if not ids:
        return
    numbers = np.asarray(sorted(ids), np.int64)
    lengths = np.zeros(numbers[-1] + 1, np.int64)
    lengths[numbers] = [len(ids[number]) for number in numbers.tolist()]
    packed = pack(lengths, numbers, length_bucket(int(lengths.max())))
    segments = length_bucket(max(len(packed[row]) for row in range(len(packed))))
    sizes = {"batch": ROWS, "length": length_bucket(int(lengths.max())), "units": segments // 2}
    for first in range(0, len(packed), ROWS):
        batch = empty_arrays(("tokens", "positions", "segment_ids", "weights", "units"), sizes)
        rows = [packed[row] for row in range(first, min(first + ROWS, len(packed)))]
        for row, documents in enumerate(rows):
            start = 0
            for segment, number in enumerate(documents.tolist(), 1):
                end = start + len(ids[number])
                batch["tokens"][row, start:end], batch["segment_ids"][row, start:end] = ids[number], segment
                batch["positions"][row, start:end] = np.arange(end - start)
                batch["weights"][row, end - 1] = 1.0  # where the score is read
                start = end
        yield rows, batch


def _document(prompt: Prompt, completion: Prompt, origin: Origin) -> Document:
    if isinstance(prompt, str):
        return Text(_text(completion), origin, prompt=prompt)
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    return Conversation(tuple(map(_message, [*prompt, *answer])), origin)


def _text(completion: Prompt) -> str:
    return completion if isinstance(completion, str) else "".join(str(message["content"]) for message in completion)


def _message(fields: Mapping[str, Any]) -> Message:
    extra = {key: value for key, value in fields.items() if key not in ("role", "content", "tool_calls")}
    calls = tuple(fields.get("tool_calls") or ())
    return Message(fields["role"], fields.get("content") or "", tool_calls=calls, extra=tuple(extra.items()))


def check_reward_model(path: str) -> None:
    """Raises UserError for a local path that holds no reward model, by what its small files say."""
    directory, _ = split_state(path)
    if not directory.is_dir():
        return  # a hub id, or nothing: loading says which
    if is_run(directory):
        recipe = directory / "recipe.yaml"
        if recipe.is_file() and (kind := load_recipe(recipe).stage.kind) != "rm":
            raise _not_a_reward_model(path, f"it is a run of stage {kind}")
    elif (directory / ADAPTER_CONFIG).is_file():
        if read_json(directory / ADAPTER_CONFIG).get("task_type") != "SEQ_CLS":
            raise _not_a_reward_model(path)
    elif (directory / "config.json").is_file():
        names = json.dumps(read_json(directory / "config.json").get("architectures"))
        if "ForSequenceClassification" not in names:
            raise _not_a_reward_model(path, f"its architecture is {names}")


def _not_a_reward_model(path: str, reason: str = "it has no head of one score") -> UserError:
    return UserError(
        f"'{path}' is no reward model: {reason}",
        where="rewards, model",
        fix="give a run of stage rm (`meshtune train` with stage: rm, from pairs of a better and a worse answer), or a "
        "model that transformers calls ForSequenceClassification with one label",
    )
