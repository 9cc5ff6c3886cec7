"""The ready kinds of rewards: each makes a function with the arguments of TRL's reward functions from its options.

They run in the process of rewards (reward_process). A completion that takes a pattern, a schema or math-verify too long
scores 0, since the model wrote it.
"""

from __future__ import annotations

import contextlib
import decimal
import importlib
import json
import logging
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path
from typing import Any

from meshtune.data.readers.reasoning_gym import gym_score
from meshtune.errors import UserError, pip_install
from meshtune.json_text import parse_json, read_json
from meshtune.rollout.code_sandbox import START_SECONDS, Limits, passed_share
from meshtune.rollout.reward_functions import Prompt, RewardFunction
from meshtune.rollout.servers import ask_server, server_error

Options = Mapping[str, Any]
COMPLETION_SECONDS = 2.0  # in which a pattern or a schema must decide about one completion
MATHS_SECONDS = 10  # in which math-verify must read one completion, and compare it


def text_of(completion: Prompt) -> str:
    """The text of a completion: that of the assistant's last message where it is a list of messages."""
    if isinstance(completion, str):
        return completion
    contents = (message.get("content") for message in reversed(completion) if message.get("role") == "assistant")
    return str(next(contents, None) or "")


def column_of(columns: Mapping[str, Sequence[Any]], name: str, kind: str) -> Sequence[Any]:
    """The values of a column. Raises UserError where the records have none of that name."""
    if name in columns:
        return columns[name]
    raise UserError(
        f"the reward {kind} compares with the field '{name}', and no record has it; their other fields are: "
        f"{', '.join(columns) or 'none'}",
        where=f"rewards, {kind}",
        fix=f"name the field: {{kind: {kind}, column: ...}}",
    )


class _Slow(Exception):
    """Raised in the main thread when its time is up."""


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises _Slow in the block after some seconds; the main thread's regular expressions look for signals too."""

    def stop(number: int, frame: object) -> None:
        raise _Slow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def score_each(score: Callable[..., float | None], *lists: Sequence[Any]) -> list[float | None]:
    """The score of each completion, 0 for one that takes too long."""
    scores: list[float | None] = []
    for entry in zip(*lists, strict=True):
        try:
            with _limit(COMPLETION_SECONDS):
                scores.append(score(*entry))
        except _Slow:
            scores.append(0.0)
    return scores


def pattern(options: Options) -> RewardFunction:
    """1 where the pattern matches, and with a group where that is the column's text."""
    compiled, group, name = re.compile(options["pattern"]), options["group"], options["column"]
    match = compiled.fullmatch if options["match"] == "full" else compiled.search

    def score(completion: Prompt, expected: Any) -> float | None:
        if group is not None and expected is None:
            return None
        matched = match(text_of(completion))
        if matched is None or group is None:
            return float(matched is not None)
        return float((matched[group] or "").strip() == str(expected).strip())

    def reward(completions: Sequence[Prompt], **columns: Sequence[Any]) -> list[float | None]:
        expected = [None] * len(completions) if group is None else column_of(columns, name, "pattern")
        return score_each(score, completions, expected)

    return reward


def json_schema(options: Options) -> RewardFunction:
    """1 where the completion is JSON that the schema allows. Raises UserError for a schema that is none."""
    jsonschema = _package("jsonschema", "json_schema")
    source, where = options["json_schema"], "rewards, json_schema"
    schema = read_json(Path(source)) if isinstance(source, str) else source
    validator_type = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator_type.check_schema(schema)
    except jsonschema.SchemaError as problem:
        place = "/".join(map(str, problem.absolute_path)) or "its root"
        raise UserError(f"the JSON schema is none: {problem.message}", where=f"{where}, at {place}") from problem
    validator = validator_type(schema)

    def score(completion: Prompt) -> float:
        try:
            value = parse_json(text_of(completion), where)
        except UserError:
            return 0.0
        try:
            return float(validator.is_valid(value))
        except RecursionError:
            return 0.0

    return lambda completions, **columns: score_each(score, completions)


_NUMBER = re.compile(r"(?:(?<!\w)[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?:(?<!\w)[-+])?\.\d+")


def last_number(text: str) -> decimal.Decimal | None:
    """The last decimal number in a text, in which commas may separate thousands."""
    numbers = _NUMBER.findall(text)
    try:
        return decimal.Decimal(numbers[-1].replace(",", "")) if numbers else None
    except decimal.InvalidOperation:
        return None


def equals(options: Options) -> RewardFunction:
    """1 where the completion's last number, or its text, is the column's."""
    name, part = options["column"], options["part"]

    def score(completion: Prompt, expected: Any) -> float | None:
        if expected is None:
            return None
        text, written = text_of(completion), text_of(expected) if isinstance(expected, list) else str(expected)
        is_number = not isinstance(expected, bool) and _NUMBER.fullmatch(written.strip()) is not None
        if part == "text" or (part == "auto" and not is_number):
            return float(text.strip() == written.strip())
        solution = last_number(written)
        return None if solution is None else float(last_number(text) == solution)

    def reward(completions: Sequence[Prompt], **columns: Sequence[Any]) -> list[float | None]:
        return score_each(score, completions, column_of(columns, name, "equals"))

    return reward


def maths(options: Options) -> RewardFunction:
    """1 where math-verify finds the completion's result equal to the column's; None where that has none.

    As trl's accuracy_reward, and a completion's result may be a plain expression where it has none in LaTeX.
    """
    verifier, normaliser = _package("math_verify", "maths"), _package("latex2sympy2_extended", "maths")
    for name in ("parser", "grader"):
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    latex = verifier.LatexExtractionConfig(
        normalization_config=normaliser.NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    extraction = [latex, verifier.ExprExtractionConfig()]

    def score(completion: Prompt, solution: Any) -> float | None:
        gold = [] if solution is None else verifier.parse(str(solution), parsing_timeout=MATHS_SECONDS)
        if not gold:
            return None
        answer = verifier.parse(
            text_of(completion),
            extraction_config=extraction,
            extraction_mode="first_match",
            parsing_timeout=MATHS_SECONDS,
        )
        return float(verifier.verify(gold, answer, timeout_seconds=MATHS_SECONDS))

    def reward(completions: Sequence[Prompt], **columns: Sequence[Any]) -> list[float | None]:
        return [score(*pair) for pair in zip(completions, column_of(columns, options["column"], "maths"), strict=True)]

    return reward


_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code(options: Options) -> RewardFunction:
    """The share of the column's tests that the completion's last block of Python (or all of it) passes."""
    limits = Limits(options["seconds"], options["memory"] << 20)

    def score(completion: Prompt, tests: Any) -> float | None:
        if not tests:
            return None
        text = text_of(completion)
        blocks = _BLOCK.findall(text)
        return passed_share(blocks[-1] if blocks else text, [tests] if isinstance(tests, str) else tests, limits)

    def reward(completions: Sequence[Prompt], **columns: Sequence[Any]) -> list[float | None]:
        tests = column_of(columns, options["column"], "code")
        with ThreadPoolExecutor(cpu_count()) as pool:
            return list(pool.map(score, completions, tests))

    return reward


def length(options: Options) -> RewardFunction:
    """How near the number of tokens is to a target, or whether it is between two bounds."""
    target, lower, upper = options["target"], options["min_tokens"] or 0, options["max_tokens"]

    def score(count: int) -> float:
        if target is not None:
            return max(0.0, 1 - abs(count - target) / target)
        return float(lower <= count and (upper is None or count <= upper))

    return lambda completion_ids, **columns: [score(len(ids)) for ids in completion_ids]


def overlong(options: Options) -> RewardFunction:
    """0, falling to -1 within the last `buffer` tokens before `max_tokens`."""
    limit, buffer = options["max_tokens"], options["buffer"]
    if limit is None or buffer > limit:
        raise UserError(
            "overlong has no max_tokens" if limit is None else f"the buffer {buffer} is more than max_tokens {limit}",
            where="rewards, overlong",
            fix="give max_tokens, which is rollout.max_tokens by default, and a smaller buffer",
        )

    def score(count: int) -> float:
        excess = count - (limit - buffer)
        return 0.0 if excess <= 0 else -min(1.0, excess / buffer)

    return lambda completion_ids, **columns: [score(len(ids)) for ids in completion_ids]


def url(options: Options) -> RewardFunction:
    """The rewards that a server answers. Tries three times within the timeout, then raises UserError."""
    address, timeout = options["url"], options["timeout"]

    def reward(prompts: Any, completions: Any, finish_reasons: Any, **columns: Any) -> list[Any]:
        records = {name: values for name, values in columns.items() if name not in _NO_COLUMNS}
        body = {"prompts": prompts, "completions": completions, "columns": records}
        failure, fix = "the server of rewards gave none", "start the server, or raise the reward's timeout"
        answer = ask_server(address, body, time.monotonic() + timeout, failure=failure, fix=fix)
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            problem = f"its answer has no list 'rewards': {json.dumps(answer)[:100]}"
            raise server_error(address, failure, problem, "let it answer {rewards: [...]}")
        return rewards

    return reward


_NO_COLUMNS = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")


def reasoning_gym(options: Options) -> RewardFunction:
    """The score of reasoning-gym for each answer."""
    _package("reasoning_gym", "reasoning_gym")

    def reward(completions: Sequence[Prompt], **columns: Sequence[Any]) -> list[float | None]:
        entries = column_of(columns, "entry", "reasoning_gym")
        return [gym_score(text_of(completion), entry) for completion, entry in zip(completions, entries, strict=True)]

    return reward


def _package(name: str, kind: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        raise UserError(
            f"the reward {kind} needs the package {problem.name}, which is not installed",
            where=f"rewards, {kind}",
            fix=pip_install("rl"),
        ) from problem


def allowance(options: Options, count: int) -> float:
    """Seconds beside its timeout that a kind may need for `count` completions because of what the model wrote."""
    match options["kind"]:
        case "pattern" | "json_schema" | "equals":
            return count * COMPLETION_SECONDS
        case "maths":
            return count * 3.0 * MATHS_SECONDS
        case "code":
            return count * (options["seconds"] + START_SECONDS)
        case "url":
            return 5.0  # its own error comes first
        case _:
            return 0.0


KINDS: dict[str, Callable[[Options], RewardFunction]] = {
    "pattern": pattern,
    "json_schema": json_schema,
    "equals": equals,
    "maths": maths,
    "code": code,
    "length": length,
    "overlong": overlong,
    "url": url,
    "reasoning_gym": reasoning_gym,
}
