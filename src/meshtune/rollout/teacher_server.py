"""Asks a teacher behind an address how likely it finds tokens: vLLM's completions API, which `meshtune serve` has too.

Such a server names the likeliest tokens of every position, and the token of the text. Others have the rest of the
probability together (kernels.divergence.NamedTokens).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshtune.config.recipe import TeacherSection
from meshtune.errors import UserError
from meshtune.mesh.processes import SINGLE_PROCESS, Job
from meshtune.rollout.servers import ask_server, server_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FAILURE = "the teacher's server gave no probabilities"
TEXTS = 8  # in a request; the server computes them together
PROBED = 32  # tokens of the vocabulary that are compared before a run
LEAST = -9999.0  # vLLM's logarithm of 0


class Named(NamedTuple):
    """The tokens that the teacher names in place of each of n tokens: the token itself, then its likeliest others.

    `ids` int32 [n, K + 1], -1 for none, and `log_probs` float32 of their shape.
    """

    ids: np.ndarray
    log_probs: np.ndarray


class TeacherServer:
    """The teacher at the address of a recipe, for a student with `tokenizer` and predictions of `vocab` tokens.

    Process 0 of `job` asks it, for all.
    """

    def __init__(
        self, section: TeacherSection, tokenizer: PreTrainedTokenizerFast, vocab: int, job: Job = SINGLE_PROCESS
    ):
        self.options, self._tokenizer, self._vocab, self._job = section, tokenizer, vocab, job
        self._address, self._model, self._count = section.path.rstrip("/"), section.model, 0

    def check(self) -> None:
        """Raises: UserError for a server that cannot be asked, and for one of another vocabulary."""
        count = min(len(self._tokenizer), self._vocab)
        self.score([[int(id_) for id_ in np.unique(np.linspace(0, count - 1, PROBED).astype(int))]], [1])

    def score(self, texts: Sequence[list[int]], starts: Sequence[int]) -> list[Named]:
        """The teacher's log-probabilities of each text's tokens from its start on, which is at least 1. Collective.

        Raises: UserError, within the time-out for all texts together.
        """
        deadline, results = time.monotonic() + self.options.timeout, []
        for first in range(0, len(texts), TEXTS):
            answers, part = None, slice(first, first + TEXTS)
            if self._job.is_main_process:
                answers = [
                    [array.tolist() for array in named]
                    for named in self._ask_about(texts[part], starts[part], deadline)
                ]
            self._count += 1
            shared = self._job.broadcast(f"answers of the teacher {self._count}", answers)
            results += [Named(np.array(ids, np.int32), np.array(log_probs, np.float32)) for ids, log_probs in shared]
        return results

    def _ask_about(self, texts: Sequence[list[int]], starts: Sequence[int], deadline: float) -> list[Named]:
        """One request."""
        body = {
            "model": self._model_name(deadline),
            "prompt": list(texts),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self.options.top_k,
        }
        choices = self._ask("/completions", body, deadline).get("choices")
        if not isinstance(choices, list) or len(choices) != len(texts):
            raise self._error(f"its answer has not one choice for each of {len(texts)} texts")
        choices = sorted(choices, key=lambda choice: choice["index"])
        return [
            self._named(ids, start, choice.get("prompt_logprobs"))
            for ids, start, choice in zip(texts, starts, choices, strict=True)
        ]

    def _model_name(self, deadline: float) -> str:
        if self._model is None:
            models = self._ask("/models", None, deadline).get("data")
            names = [str(model.get("id")) for model in models if isinstance(model, dict)] if models else []
            if len(names) != 1:
                raise UserError(
                    f"the teacher's server has {', '.join(names) or 'no model'}, and one is needed",
                    where=self._address,
                    fix="name it: teacher: {path: ADDRESS, model: NAME}",
                )
            self._model = names[0]
        return self._model

    def _ask(self, path: str, body: object, deadline: float) -> Mapping[str, Any]:
        fix = f"start the server ({self._address} is its address with /v1), or raise teacher.timeout"
        answer = ask_server(self._address + path, body, deadline, failure=FAILURE, fix=fix)
        if not isinstance(answer, dict):
            raise self._error("its answer is no JSON object")
        return answer

    def _named(self, ids: Sequence[int], start: int, positions: object) -> Named:
        if not isinstance(positions, list) or len(positions) != len(ids):
            raise self._error("its answer has no prompt_logprobs of every token")
        width = self.options.top_k + 1
        named = Named(np.full((len(ids) - start, width), -1, np.int32), np.zeros((len(ids) - start, width), np.float32))
        for row in range(len(ids) - start):
            values = self._log_probs(ids[start + row], positions[start + row])
            named.ids[row, : len(values)] = list(values)
            named.log_probs[row, : len(values)] = list(values.values())
        return named

    def _log_probs(self, target: int, entry: object) -> dict[int, float]:
        """The log-probabilities of a position by token: the target's, then those of others, the likeliest first."""
        if not isinstance(entry, dict) or str(target) not in entry:
            raise self._error(f"its answer does not say how likely it finds token {target}, which is in the text")
        values: dict[int, float] = {}
        try:
            text = entry[str(target)].get("decoded_token")
            for id_, fields in entry.items():
                if 0 <= int(id_) < self._vocab:  # a teacher may have rows that are no tokens
                    values[int(id_)] = max(float(fields["logprob"]), LEAST)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._error(f"its answer has no prompt_logprobs by token id: {str(entry)[:100]}") from error
        self._check_text(target, text)
        if any(math.isnan(value) or value > 1e-3 for value in values.values()):
            raise self._error(f"its answer has numbers that are no log-probabilities: {str(entry)[:100]}")
        others = sorted((id_ for id_ in values if id_ != target), key=lambda id_: -values[id_])
        return {id_: values[id_] for id_ in [target, *others[: self.options.top_k]]}

    def _check_text(self, id_: int, text: object) -> None:
        """Raises: UserError for a token that the student reads as another text; parts of characters may differ."""
        ours = str(self._tokenizer.decode([id_]))
        if not isinstance(text, str) or "\ufffd" in ours + text:
            return
        if ours.strip() and text.strip(" ▁Ġ") and ours.strip() != text.strip(" ▁Ġ\n\t\r"):
            raise UserError(
                f"the teacher has another vocabulary: token {id_} is {text!r} there and {ours!r} in the student's, so "
                "their predictions are of other tokens",
                where=self._address,
                fix="use a teacher of the student's family and vocabulary; or generate answers with this one and learn "
                "them by stage: sft",
            )

    def _error(self, problem: str) -> UserError:
        return server_error(
            self._address,
            FAILURE,
            problem,
            "use vLLM or meshtune serve, whose /v1/completions has prompt_logprobs; or give the teacher's folder or "
            "hub id",
        )
