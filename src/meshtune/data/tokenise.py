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
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.config.data_options import LossPolicy, TokenOptions
from meshtune.config.sections import DataSection
from meshtune.data.chat import ChatTemplate
from meshtune.data.checking import TaskList
from meshtune.data.documents import DocumentList
from meshtune.data.loader import PartTask, StageExamples, with_companions
from meshtune.data.progress import Progress
from meshtune.data.report import TemplateInfo
from meshtune.data.store import (
    SHARD_NAME,
    Shard,
    Store,
    cache_directory,
    fingerprint,
    open_store,
    publish_store,
    remove_abandoned,
    remove_damaged,
    shard_size,
    write_shard,
)
from meshtune.data.tokens import TokenCounts, Tokenize
from meshtune.errors import UserError, amount
from meshtune.lazy import LazyFunction
from meshtune.objectives.stages import STAGES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.objectives.stages import DatasetType

run_tasks = LazyFunction("meshtune.data.tasks:run_tasks")
process_count = LazyFunction("meshtune.data.tasks:process_count")


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


@dataclasses.dataclass(frozen=True)
class Preparer:
    """Runs the tasks of preparing data: one in this process, several in new ones, and with other hosts.

    `share` is (index, number) of the hosts or commands that prepare the same data into the same cache. `processes`
    None: as many as there are processors (MESHTUNE_DATA_PROCESSES).
    """

    task: PartTask
    cache: str | os.PathLike[str] | None
    progress: Progress
    share: tuple[int, int] = (0, 1)
    processes: int | None = None

    @property
    def folder(self) -> pathlib.Path:
        """The folder of all stores."""
        return cache_directory(self.cache)

    def run(self, tasks: Sequence[Any], done: Callable[[int], None]) -> list[Any]:
        """The results of tasks in order. Raises UserError as they do."""
        if len(tasks) > 1:
            remove_abandoned(self.folder)
            return run_tasks(tasks, pickle.dumps(self.task), self.processes or process_count(), self.share, done)
        results = [task.make(self.task.tokenize()) for task in tasks]
        done(len(tasks))
        return results

    def store(self, split: str, samples: DocumentList) -> Store:
        """The store of the tokenised samples, made of those shards that are not there, if it is not complete.

        Its `meta` are counts, the chat template's properties (None for plain text), the number of copies, and the least
        and the largest value. Raises UserError where a template cannot render a conversation, and where the cache
        cannot be written.
        """
        parts, size = [samples.content_hash(), *task_key(self.task)], shard_size(len(samples))
        count = -(-len(samples) // size)
        if self.task.convert.dataset_type == "labelled" and count > 1:
            parts.append("companions of a shard")
        path = self.folder / fingerprint(*parts)
        store, damage = open_store(path)
        if store is not None:
            return store
        if damage is not None:
            remove_damaged(path)

        def task(number: int) -> ShardTask:
            chosen = samples[number * size : (number + 1) * size].compact() if count > 1 else samples
            return ShardTask(path / SHARD_NAME.format(number), chosen, self.task.convert, self.task.options)

        def done(shards: int) -> None:
            self.progress(f"tokenising {split} data", min(shards * size, len(samples)), len(samples))

        try:
            shards = self.run(TaskList(count, task) if count > 1 else [task(0)], done)
            samples.check_unchanged()
        except UserError:
            discard_changed(samples, path)
            raise
        store = publish_store(path, shards, self._notes(shards))
        store.damage = damage and f"the tokenised data in {path} are damaged ({damage})"
        return store

    def _notes(self, shards: Sequence[pathlib.Path]) -> dict[str, object]:
        total, template = TokenCounts(), None
        is_compared = self.task.convert.dataset_type in ("pairs", "labelled")  # the others have no values
        digests, values = list[np.ndarray](), list[np.ndarray]()
        for shard in map(Shard, shards):  # each takes a file descriptor
            add_counts(total, read_counts(shard.notes["counts"]))
            if template is None and shard.notes["conversation"]:
                template = dataclasses.asdict(template_info(ChatTemplate(self.task.tokenizer)))
            digests.append(shard.column("digests"))
            values.append(shard.column("values") if is_compared else np.zeros(min(1, len(shard)), np.float32))
        value = np.concatenate(values)
        return {
            "counts": dataclasses.asdict(total),
            "template": template,
            "copies": count_copies(digests, value, self.task.convert.dataset_type),
            "values": [float(value.min()), float(value.max())] if len(value) else None,
        }


def discard_changed(samples: DocumentList, path: pathlib.Path) -> None:
    """Removes an unfinished store if a file has changed since its records were checked, and an empty one."""
    try:
        samples.check_unchanged()
        with contextlib.suppress(OSError):
            path.rmdir()
    except UserError:
        shutil.rmtree(path, ignore_errors=True)


def count_copies(parts: list[np.ndarray], values: np.ndarray, dataset_type: DatasetType) -> int:
    """The samples with the same tokens as an earlier one, from the digests of several shards, which are taken out of
    `parts`: of pairs both answers, of labelled answers the label too, and not the companions that are made of them."""
    digests, start = np.empty(sum(map(len, parts)), np.uint64), 0
    while parts:
        part = parts.pop(0)
        digests[start : start + len(part)] = part
        start += len(part)
    if dataset_type in ("documents", "prompts"):
        digests.sort()
        return int(np.count_nonzero(digests[1:] == digests[:-1]))
    samples = digests.reshape(-1, 2)
    if dataset_type == "labelled":
        samples = np.stack([samples[:, 0], values[::2].astype(np.uint64)], axis=1)
    return len(samples) - len(np.unique(samples, axis=0))


@dataclasses.dataclass(frozen=True)
class ShardTask:
    """Writes a shard of the examples that `convert` makes of some samples."""

    file: pathlib.Path
    samples: DocumentList
    convert: StageExamples
    options: TokenOptions

    def make(self, tokenize: Tokenize) -> pathlib.Path:
        """Writes the shard; returns its file. Raises UserError as `convert` does, where the file cannot be written,
        and if a source has changed."""
        tokenize.start_counts()
        examples = self.convert(tokenize, self.samples)
        if self.convert.dataset_type == "labelled":
            examples = with_companions(examples, self.options.max_length)

        def notes() -> dict[str, object]:
            return {"counts": dataclasses.asdict(tokenize.counts), "conversation": tokenize.saw_conversation}

        write_shard(self.file, examples, notes, self.samples.check_unchanged)
        return self.file

    def load(self) -> pathlib.Path | None:
        """The file of the shard; None if it is not there, or damaged."""
        try:
            return Shard(self.file).file
        except (OSError, UserError):
            return None


def task_key(task: PartTask) -> list[str]:
    """The texts that identify the examples of samples. Stages that make the same examples of them share a store."""
    key = [tokenizer_hash(task.tokenizer), task.options.cache_key()]
    if task.convert.score_position:
        key.append("scored")
    key += role_ends(task.tokenizer)
    return key if task.pictures is None else [*key, task.pictures.key()]


def add_counts(total: TokenCounts, part: TokenCounts) -> None:
    """Adds the counts of a shard to `total`."""
    for field in dataclasses.fields(TokenCounts):
        if field.name != "first":
            setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
    total.first = part.first | total.first


def read_counts(stored: Mapping[str, Any]) -> TokenCounts:
    """Counts as they were recorded."""
    counts = TokenCounts(**stored)
    counts.skipped = [(origin, reason) for origin, reason in stored["skipped"]]
    return counts


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
