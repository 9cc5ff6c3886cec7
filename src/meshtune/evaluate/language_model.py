"""A Meshtune model as lm-eval sees one. Importing this needs lm_eval; `extras.optional` says so.

Encodes, cuts and decodes as lm-eval's own transformers backend does, so that numbers are comparable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from rich.console import Console

from meshtune.data.chat import template_error
from meshtune.errors import UserError
from meshtune.evaluate.folder import show_progress
from meshtune.evaluate.predict import ROWS, Prompt, answers
from meshtune.generate.api import Model
from meshtune.generate.request import Sampling
from meshtune.generate.target_log_probs import TargetText
from meshtune.generate.text import chat_template

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")  # of a task's generation_kwargs

TokenRequest = tuple[tuple[str, str], list[int], list[int]]
"""((context, continuation), ids of the context, ids of the continuation)"""


class EngineLM(TemplateLM):
    """lm-eval's model over Meshtune's engine. `cut` counts the requests whose context was cut from the left, as they
    were longer than the model's."""

    backend = "causal"

    def __init__(self, model: Model, *, console: Console, rows: int = ROWS):
        super().__init__()
        self.model, self.tokenizer = model, model.tokenizer
        self._console, self._rows = console, rows
        self.cut = 0

    @property
    def eot_token_id(self) -> int:
        """The id of the tokenizer's end token."""
        return _token_id(self.tokenizer.eos_token_id, self.model)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: the token that texts begin with, else the end token."""
        begin = self.tokenizer.bos_token_id
        return begin if isinstance(begin, int) else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Tokens of a context and its continuation, at most."""
        return self.model.engine.context

    @property
    def max_gen_toks(self) -> int:
        """Tokens of an answer at most, where a task does not say."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        """A name for caches of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text; special tokens are added unless it begins with its first one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tok_decode([self.prefix_token_id], False))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)  # pyright: ignore

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the model's chat template writes it; without a system turn where it refuses one."""
        chat = chat_template(self.tokenizer)
        unfinished = None if add_generation_prompt else {"continue_final_message": True}
        for messages in (chat_history, [message for message in chat_history if message["role"] != "system"]):
            try:
                return chat.render(messages, generation_prompt=add_generation_prompt, options=unfinished)
            except chat.failures as problem:
                failure = problem
        raise template_error(failure, where="the task's conversation") from failure

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As TemplateLM has it, without its bar of tokenising."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in disjoint windows of the model's context."""
        windows: list[TokenRequest] = []
        counts = []
        for request in requests:
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            disjoint = [utils.make_disjoint_window(window) for window in rolling]
            windows += [(("", ""), context, continuation) for context, continuation in disjoint]
            counts.append(len(disjoint))
        values = iter(self._loglikelihood_tokens(windows, cached=False))
        totals = [sum(next(values)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], cached: bool = True, **options: Any
    ) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, whether every token was the likeliest) of each continuation."""
        texts = []
        for names, context, continuation in requests:
            if not continuation or len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation has {len(continuation)} tokens, and the model's context is {self.max_length}",
                    where=f"the continuation of {names[0][-80:]!r}",
                    fix="leave the task out, or give a model with a longer context",
                )
            ids = (*context, *continuation)
            self.cut += len(ids) > self.max_length + 1
            ids = ids[-(self.max_length + 1) :]
            texts.append(TargetText(ids, len(ids) - len(continuation)))
        model = self.model
        with show_progress(self._console, "log-likelihoods") as progress:
            targets = model.target_log_probs(texts, progress)
        results = [(float(np.sum(target.log_probabilities)), bool(target.likeliest.all())) for target in targets]
        if cached:
            for (names, _, _), result in zip(requests, results, strict=True):
                self.cache_hook.add_partial("loglikelihood", names, result)
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that the model adds to each context, up to the first of the task's stop strings."""
        prompts = [self._prompt(*request.args) for request in requests]
        texts = [""] * len(prompts)
        with show_progress(self._console, "answers") as progress:
            finished = answers(self.model.engine, self.tokenizer, prompts, rows=self._rows)
            for done, (number, answer) in enumerate(finished, 1):
                texts[number] = answer.text
                self.cache_hook.add_partial("generate_until", requests[number].args, answer.text)
                progress(done, len(prompts))
        return texts

    def _prompt(self, context: str, options: Mapping[str, Any]) -> Prompt:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), self.max_gen_toks))
        max_tokens = int(kwargs.pop("max_gen_toks"))
        until = handle_stop_sequences(kwargs.pop("until", None), eos=None)
        if not kwargs.pop("do_sample", False):
            kwargs = {name: value for name, value in kwargs.items() if name not in SAMPLING}
        if unknown := sorted(set(kwargs) - set(SAMPLING)):
            raise UserError(
                f"the task's generation_kwargs have {', '.join(unknown)}, which the engine does not know",
                where="generation_kwargs",
                fix=f"give until, max_gen_toks, do_sample, {', '.join(SAMPLING)}",
            )
        room = self.max_length - max_tokens
        if room < 1:
            raise UserError(
                f"the task asks for {max_tokens} new tokens, and the model's context is {self.max_length}",
                where="generation_kwargs, max_gen_toks",
                fix=f"give a smaller one: --gen-kwargs max_gen_toks={self.max_length // 2}",
            )
        begin = self.tokenizer.bos_token
        has_begin = isinstance(begin, str) and context.startswith(begin)
        ids = self.tokenizer.encode(context, add_special_tokens=not has_begin)
        self.cut += len(ids) > room
        request = self.model.engine.request(ids[-room:], Sampling(**kwargs), max_tokens=max_tokens)
        return Prompt(request, tuple(text for text in until if text), name=f"the context {context[:60]!r}")


def _token_id(token: object, model: Model) -> int:
    if isinstance(token, int):
        return token
    raise UserError(
        "the tokenizer has no end token, which lm-eval needs",
        where=str(model.tokenizer.name_or_path),
        fix="set eos_token in tokenizer_config.json",
    )
