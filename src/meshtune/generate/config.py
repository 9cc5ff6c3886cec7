"""How the next token is chosen, as a dataclass that the command line and the Python API read."""

from __future__ import annotations

import dataclasses
import math

from meshtune.errors import UserError
from meshtune.options import option


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The default is greedy decoding.

    `repetition_penalty` counts the prompt too; `presence_penalty` and `frequency_penalty` (OpenAI's) count generated
    tokens only. Penalties and `logit_bias`, (token id, addition to its logit) pairs, also apply to greedy
    decoding; `top_k`, `top_p` and `min_p` only where temperature is above 0. Of several prompts, prompt i draws with
    seed + i, as in a call without the others.
    Raises UserError for a value out of its range.
    """

    temperature: float = option(0.0, "0 takes the likeliest token.", flags=("--temperature", "-t"))
    top_k: int = option(0, "Only the k likeliest tokens; 0 is off.")
    top_p: float = option(1.0, "Only the likeliest tokens up to this probability; 1 is off.")
    min_p: float = option(0.0, "Only tokens this likely, relative to the likeliest; 0 is off.")
    repetition_penalty: float = option(1.0, "Above 1 repeats less; 1 is off.")
    seed: int = option(0, "The same seed gives the same text.")
    presence_penalty: float = option(0.0, "Taken from the logit of every token that was generated; 0 is off.")
    frequency_penalty: float = option(0.0, "Taken from a token's logit each time it was generated; 0 is off.")
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self):
        _check("temperature", self.temperature, 0 <= self.temperature <= 100, "0 (greedy) to 100, often 0.7 to 1")
        top_k = _is_int(self.top_k) and 0 <= self.top_k < 2**31
        _check("top_k", self.top_k, top_k, "0 (off) or a whole number below 2147483648, often 50")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (off), often 0.95")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 (off) to 1, often 0.05")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            0.01 <= self.repetition_penalty <= 100,
            "0.01 to 100; 1 is off",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2 <= value <= 2, "-2 to 2; 0 is off")
        for token, bias in self.logit_bias:
            _check(
                "logit_bias", bias, _is_int(token) and token >= 0 and -100 <= bias <= 100, "token ids with -100 to 100"
            )
        in_range = _is_int(self.seed) and 0 <= self.seed < 2**31
        _check("seed", self.seed, in_range, "a whole number from 0 to 2147483647")

    def of_row(self, row: int) -> Sampling:
        """How prompt number `row` of several is sampled: the same with another seed."""
        return dataclasses.replace(self, seed=(self.seed + row) % 2**31)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: float, in_range: bool, valid: str) -> None:
    if not in_range or not math.isfinite(value):
        raise UserError(f"{name} = {value!r:.40} is out of range", where=f"sampling, {name}", fix=f"give {valid}")
