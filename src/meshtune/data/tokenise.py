"""Tokenises the samples of a split for a stage, or opens the cached result."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import pickle
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from meshtune.config.data_options import LossPolicy, TokenOptions
from meshtune.config.sections import DataSection
from meshtune.data.chat import ChatTemplate
from meshtune.data.documents import DocumentList
from meshtune.data.loader import PartTask, StageExamples, with_companions
from meshtune.data.progress import Progress
from meshtune.data.report import TemplateInfo
from meshtune.data.store import (
    PART,
    ExampleArrays,
    MakePart,
    Part,
    Store,
    add_counts,
    cache_directory,
    fingerprint,
    group_examples,
    make_part,
    open_or_build,
    tokenised_parts,
)
from meshtune.data.tokens import TokenCounts, Tokenize
from meshtune.errors import UserError, amount
from meshtune.lazy import LazyFunction
from meshtune.objectives.stages import STAGES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


PartProcess = LazyFunction("meshtune.data.part_process:PartProcess")
process_count = LazyFunction("meshtune.data.part_process:process_count")
IN_PROCESS = 8192  # samples that are tokenised before other processes would have started
_THREADS = max(2, min(4, os.cpu_count() or 1))  # more would wait for Python's lock


def token_options(data: DataSection, stage: str = "sft", answer: int = 0) -> TokenOptions:
    """The tokenising options of a recipe. Stages that compare answers train on the last turn, stage pt on all text.
    Prompts leave room for an `answer` of as many tokens."""
    policy = LossPolicy(data.train_on_prompt, data.last_turn_only, data.reasoning, data.train_on_tail)
    if STAGES[stage].dataset_type != "documents":
        policy = LossPolicy(last_turn_only=True, reasoning=data.reasoning, train_on_tail=data.train_on_tail)
    elif stage == "pt":
        policy = LossPolicy(train_on_prompt=True)
    return TokenOptions(
        max_length=data.max_length - answer,
        policy=policy,
        overlong=data.overlong,
        skip_bad=data.on_bad == "skip",
    )


def tokenised_store(
    split: str,
    samples: DocumentList,
    task: PartTask,
    cache: str | os.PathLike[str] | None,
    progress: Progress | None,
    share: tuple[int, int] = (0, 1),
) -> tuple[Store, TokenCounts, TemplateInfo | None]:
    """The store of the tokenised samples, the counts, and the chat template's properties (None for plain text).

    `share` is (index of this host, number of hosts) that tokenise the same samples into the same cache.

    Raises UserError where a template cannot render a conversation, and where the cache cannot be written.
    """
    key = fingerprint(samples.content_hash(), *_task_key(task))
    directory = cache_directory(cache) / f".parts-{key}" if len(samples) > PART else None
    total, conversation = TokenCounts(), False

    def report(done: int) -> None:
        if progress is not None:
            progress(f"tokenising {split} data", done, len(samples))

    def parts() -> Iterator[ExampleArrays]:
        nonlocal conversation
        few = directory is None
        parts = _part(task, samples, report) if few else _parts_at_once(task, samples, directory, report, share)
        try:
            for part in parts:
                add_counts(total, part.counts)
                conversation |= part.conversation
                yield part.examples
        finally:
            if directory is None:
                samples.check_unchanged()
            else:
                _check_unchanged(samples, directory)

    def meta() -> dict[str, object]:
        template = dataclasses.asdict(template_info(ChatTemplate(task.tokenizer))) if conversation else None
        return {"counts": dataclasses.asdict(total), "template": template}

    groups = _with_companions(parts(), task.options.max_length) if task.convert.dataset_type == "labelled" else parts()
    # Stores of versions that did not look for the words of every message have no places of what they counted.
    store = open_or_build(key, lambda: (groups, meta), cache, is_current=lambda meta: "first" in meta["counts"])
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    return store, *_read_counts(store)


def _task_key(task: PartTask) -> list[str]:
    """The texts that identify what is made of samples. Stages that make the same examples of them share a store."""
    key = [tokenizer_hash(task.tokenizer), task.options.cache_key()]
    if task.convert.score_position:
        key.append("scored")
    key += role_ends(task.tokenizer)
    return key if task.pictures is None else [*key, task.pictures.key()]


def _with_companions(parts: Iterator[ExampleArrays], max_length: int) -> Iterator[ExampleArrays]:
    """The examples of labelled answers with their companions, which cross the edges of parts."""
    return group_examples(with_companions((example for part in parts for example in part), max_length))


def _read_counts(store: Store) -> tuple[TokenCounts, TemplateInfo | None]:
    stored, template = store.meta["counts"], store.meta["template"]
    names = {field.name for field in dataclasses.fields(TokenCounts)}
    counts = TokenCounts(**{name: value for name, value in stored.items() if name in names})
    counts.skipped = [(origin, reason) for origin, reason in stored["skipped"]]
    return counts, TemplateInfo(**template) if template else None


def _check_unchanged(samples: DocumentList, directory: pathlib.Path) -> None:
    """Raises UserError if a file has changed since its records were checked, and removes the parts in `directory`,
    which may not be of the records that were checked."""
    try:
        samples.check_unchanged()
    except UserError:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _part(task: PartTask, samples: DocumentList, progress: Callable[[int], None]) -> Iterator[Part]:
    """The only part of a few samples."""
    yield make_part(samples, Tokenize(task.tokenizer, task.options, task.pictures), task.convert)
    progress(len(samples))


def _parts_at_once(
    task: PartTask,
    samples: DocumentList,
    directory: pathlib.Path | None,
    progress: Callable[[int], None],
    share: tuple[int, int],
) -> Iterator[Part]:
    with contextlib.ExitStack() as processes:
        makers: list[MakePart]
        if len(samples) > IN_PROCESS and (count := process_count()) > 1:
            pickled = pickle.dumps(task)
            makers = [processes.enter_context(PartProcess(pickled)) for _ in range(count)]
        else:
            makers = [task.maker() for _ in range(_THREADS)]
        yield from tokenised_parts(samples, makers, directory, progress, share)


def role_ends(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """The tokens that end turns where the template writes none, for the cache key: other files than the tokenizer's
    decide them."""
    if not tokenizer.chat_template:
        return ()
    try:
        return tuple(sorted(ChatTemplate(tokenizer).role_ends.values()))
    except UserError:
        return ()  # the template is refused, with the record's name, when a conversation is rendered


def stage_examples(stage: str) -> StageExamples:
    """The maker of a stage's examples."""
    properties = STAGES[stage]
    return StageExamples(properties.dataset_type, properties.has_score_head, plain_text=stage == "pt")


def ends_with_token(chat: ChatTemplate) -> bool:
    """Whether a chat template ends turns with a token of its tokenizer."""
    try:
        return chat.end_of_turn.token is not None
    except UserError:
        return False


def template_info(chat: ChatTemplate) -> TemplateInfo:
    """The properties of a chat template."""
    end = chat.end_of_turn
    return TemplateInfo(end.head, end.token is not None, chat.writes_date)


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash of everything in a tokenizer that affects ids."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    special = {name: str(value) for name, value in sorted(tokenizer.special_tokens_map.items())}
    example = str(tokenizer("a")["input_ids"])
    parts = [backend.to_str(), json.dumps(tokenizer.chat_template), json.dumps(special), example]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def nothing_to_train_error(split: str, counts: TokenCounts) -> UserError:
    """The error for a split without any document left, with the reasons."""
    reasons = {
        ("contains", "contain", "nothing to train on"): counts.nothing_to_train,
        ("has", "have", "nothing to train on after truncation"): counts.nothing_after_truncation,
        ("is", "are", "longer than max_length"): counts.dropped,
        ("is", "are", "not what the chat template can write"): len(counts.skipped),
    }
    listed = ", ".join(
        f"{amount(count, singular, several)} {reason}"
        for (singular, several, reason), count in reasons.items()
        if count
    )
    first = next(iter([*counts.first.values(), *(f"{origin}: {reason}" for origin, reason in counts.skipped)]), None)
    return UserError(
        f"the {split} data contain nothing to train on: of {amount(counts.documents, 'document')}, {listed or 'none'}"
        + (f" (the first: {first})" if first else ""),
        where=f"data.{split}",
        fix="see `meshtune data inspect`; raise data.max_length, or check roles and message weights",
    )


def one_label_error(answers: int, good: bool) -> UserError:
    """The error for labelled answers that all have the same label."""
    return UserError(
        f"{'the one answer is' if answers == 1 else f'all {answers:,} answers are'} labelled "
        f"{'true' if good else 'false'}, so there is nothing to tell good answers from bad ones",
        where="data.train",
        fix="add answers with the other label; or train on the good ones with stage: sft",
    )
