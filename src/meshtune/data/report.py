"""The report on prepared data: counts, a length histogram and warnings, as a dataclass and for a terminal."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from meshtune.data.checking import SkippedRecord
from meshtune.data.loader import Loader
from meshtune.data.tokens import TokenCounts
from meshtune.errors import amount
from meshtune.lazy import LazyFunction

if TYPE_CHECKING:
    from meshtune.data.pictures.rows import PictureCounts
    from meshtune.data.prompts import PromptLoader
    from meshtune.objectives.stages import DatasetType

count_pictures = LazyFunction("meshtune.data.pictures.rows:count_pictures")
# Shares beyond which there is a warning.
_SHARE_CUT, _SHARE_COPIES, _SHARE_TRAINED, _SHARE_FULL = 0.05, 0.05, 0.02, 0.8
_LISTED = 20  # fields of a source that are listed
_CHANGED = 5  # changed files that are named


@dataclasses.dataclass(frozen=True)
class TemplateInfo:
    """Properties of the chat template that was used."""

    end_of_turn: str
    end_is_token: bool
    writes_date: bool


@dataclasses.dataclass(frozen=True)
class DataReport:
    """The report on one split of the data.

    `efficiency` is the share of positions in the rows of the first epoch that hold a token, without the padding rows of
    its last batch. `histogram` lists (shortest, longest, documents) of each bin of lengths in tokens, both inclusive.
    `copies` counts samples with the same tokens as an earlier one; of a stream it is 0. With `sampled` the counts are
    estimates from that many samples, as of a stream. `template` is None for plain text. `cache_damage`
    describes a damaged store that was replaced. A sample of `dataset_type` pairs is two documents. `unread` lists the
    sources with fields that their formats pass over. `template_fix` is what to do about a template that ends turns with
    text. `pictures` are counts of pictures, where there are any. `changed` are files that are not what was prepared
    before.
    """

    split: str
    counts: TokenCounts
    skipped: tuple[SkippedRecord, ...]
    rows: int
    row_length: int
    packing: bool
    steps_per_epoch: int
    batch_rows: int
    efficiency: float
    histogram: tuple[tuple[int, int, int], ...]
    longest: int
    copies: int
    max_length: int
    template: TemplateInfo | None = None
    cache_damage: str | None = None
    dataset_type: DatasetType = "documents"
    sampled: int | None = None
    unread: tuple[tuple[str, tuple[str, ...]], ...] = ()
    pictures: PictureCounts | None = None
    changed: tuple[str, ...] = ()
    template_fix: str = "choose a template that writes eos_token, such as plain"

    @property
    def learned_share(self) -> float:
        """The share of the positions of all rows that have a loss; 1 where it is not known."""
        positions = self.rows * self.row_length
        known = positions and self.dataset_type != "prompts" and self.sampled is None
        return min(1.0, self.counts.trained_tokens / positions) if known else 1.0

    @property
    def samples(self) -> int:
        """The number of documents, pairs or labelled answers to train on."""
        return self.counts.examples // 2 if self.dataset_type == "pairs" else self.counts.examples

    @property
    def samples_left_out(self) -> int:
        """The number of documents, pairs or labelled answers that were read and left out."""
        left_out = self.counts.documents - self.counts.examples
        return left_out // 2 if self.dataset_type == "pairs" else left_out

    @property
    def noun(self) -> str:
        """The name of what `samples` counts, in the singular for one."""
        noun = "labelled answers" if self.dataset_type == "labelled" else self.dataset_type
        return noun.removesuffix("s") if self.samples == 1 else noun

    @property
    def notes(self) -> list[str]:
        """Facts worth knowing that are no cause for concern."""
        counts, notes = self.counts, []
        if self.sampled is not None:
            notes.append(f"a stream: its numbers are estimated from {self.sampled:,} of its {self.noun}")
        for source, fields in self.unread:
            listed = ", ".join(fields[:_LISTED]) + (f" and {len(fields) - _LISTED} more" * (len(fields) > _LISTED))
            notes.append(f"fields of {source} that are not read: {listed}")
        if counts.split:
            documents = amount(counts.split, "document is", "documents are")
            notes.append(
                f"{documents} tokenised in parts at the start of an answer, where the tokenizer would merge it "
                "with the prompt: generation will see the same tokens"
            )
        if self.template and self.template.writes_date:
            notes.append("the chat template writes today's date; in training it always writes 26 Jul 2024")
        return notes

    @property
    def warnings(self) -> list[str]:
        """Everything that makes the result worse than it could be, each with its remedy."""
        again = [f"{self.cache_damage}; they were prepared again"] if self.cache_damage else []
        again += [f"{path} has changed since it was prepared; it was read again" for path in self.changed[:_CHANGED]]
        if len(self.changed) > _CHANGED:
            again.append(f"{len(self.changed) - _CHANGED:,} more files have changed, and all were read again")
        return [*again, *_losses(self), *_training_problems(self), *_inefficiencies(self)]


def make_report(
    split: str,
    loader: Loader,
    counts: TokenCounts,
    *,
    max_length: int,
    template: TemplateInfo | None = None,
    dataset_type: DatasetType = "documents",
) -> DataReport:
    """The report on a loader's store and the rows of its first epoch."""
    store, rows = loader.store, loader.rows(0)
    lengths = store.lengths
    return DataReport(
        split=split,
        counts=counts,
        skipped=tuple(SkippedRecord(origin, reason) for origin, reason in counts.skipped),
        rows=len(rows),
        row_length=loader.row_length,
        packing=loader.packing,
        steps_per_epoch=loader.steps_per_epoch(0),
        batch_rows=loader.batch_size,
        efficiency=float((lengths - 1).sum() / (len(rows) * loader.row_length)),
        histogram=histogram(lengths),
        longest=int(lengths.max()),
        copies=store.meta["copies"],
        max_length=max_length,
        template=template,
        cache_damage=store.damage,
        dataset_type=dataset_type,
        pictures=None if loader.pictures is None else count_pictures(loader.pictures, store, rows),
    )


def prompt_report(
    split: str,
    loader: PromptLoader,
    counts: TokenCounts,
    max_length: int,
    template: TemplateInfo | None,
) -> DataReport:
    """The report on prompts; the rows that their completions will fill are not known."""
    lengths = loader.store.lengths
    return DataReport(
        split=split,
        counts=counts,
        skipped=tuple(SkippedRecord(origin, reason) for origin, reason in counts.skipped),
        rows=len(lengths),
        row_length=loader.row_length,
        packing=True,
        steps_per_epoch=loader.steps_per_epoch(0),
        batch_rows=0,
        efficiency=1.0,
        histogram=histogram(lengths),
        longest=int(lengths.max()),
        copies=len(lengths) - len(np.unique(loader.store.digests)),
        max_length=max_length,
        template=template,
        cache_damage=loader.store.damage,
        dataset_type="prompts",
    )


def histogram(lengths: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """(shortest, longest, documents) of bins that double in width, from the shortest document to the longest."""
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(powers)
    return tuple((2**p, 2 ** (p + 1) - 1, int(counts[p])) for p in range(int(powers.min()), int(powers.max()) + 1))


def _place(report: DataReport, count: str) -> str:
    """Where the first document of a count is, in parentheses; "" where that is unknown."""
    first = report.counts.first.get(count)
    return f" (the first: {first})" if first else ""


def _losses(report: DataReport) -> list[str]:
    """Warnings about data that are left out."""
    counts, warnings = report.counts, []
    if report.skipped:
        first = report.skipped[0]
        skipped = amount(len(report.skipped), "record was", "records were")
        warnings.append(f"{skipped} skipped; the first: {first.origin}: {first.reason}")
    if counts.truncated:
        share = counts.truncated / max(counts.documents, 1)
        documents = amount(counts.documents, "document")
        warnings.append(
            f"{counts.truncated:,} of {documents} ({share:.1%}) {'is' if counts.truncated == 1 else 'are'} cut at "
            f"max_length {report.max_length}, {amount(counts.tokens_cut, 'token')} in all"
            f"{_place(report, 'truncated')}: cut answers do not teach the end of turn"
            + ("; raise data.max_length" if share > _SHARE_CUT else "")
        )
    if counts.pictures_cut:
        warnings.append(
            f"{amount(counts.pictures_cut, 'picture')} cut off with the ends of documents"
            f"{_place(report, 'pictures_cut')}: raise data.max_length, or scale pictures down with vision.max_pixels "
            "or vision.crops"
        )
    if counts.nothing_after_truncation:
        warnings.append(
            f"{amount(counts.nothing_after_truncation, 'document is', 'documents are')} left out"
            f"{_place(report, 'nothing_after_truncation')}: nothing to train on after truncation (the prompt alone "
            f"fills {amount(report.max_length, 'token')}); raise data.max_length"
        )
    if counts.dropped:
        dropped = amount(
            counts.dropped, "document is dropped because it exceeds", "documents are dropped because they exceed"
        )
        warnings.append(f"{dropped} {amount(report.max_length, 'token')}{_place(report, 'dropped')}")
    if counts.nothing_to_train:
        documents = amount(counts.nothing_to_train, "document with", "documents with")
        left_out = f"{_is_or_are(counts.nothing_to_train)} left out{_place(report, 'nothing_to_train')}"
        warnings.append(f"{documents} nothing to train on {left_out}")
    return warnings


def _is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"


def _training_problems(report: DataReport) -> list[str]:
    """Warnings about documents that do not teach what they should."""
    counts, warnings = report.counts, []
    if report.template and not report.template.end_is_token and report.template.end_of_turn:
        warnings.append(
            f"the chat template ends turns with the text {report.template.end_of_turn!r}, which is not a token of this "
            f"tokenizer: generation will not know where to stop; {report.template_fix}"
        )
    if counts.unended:
        answers = amount(counts.unended, "answer has", "answers have")
        where = _place(report, "unended")
        warnings.append(f"{answers} no end of turn in the chat template: they do not teach to stop{where}")
    if counts.placeholders:
        documents = amount(counts.placeholders, "document has", "documents have")
        warnings.append(
            f"{documents} a placeholder in an answer that nothing replaces{_place(report, 'placeholders')}: write what "
            "it stands for, unless it is to be learned as it is"
        )
    if counts.without_eos:
        warnings.append("the tokenizer has no end-of-sequence token: the model does not learn to stop")
    if counts.prompts_differ:
        answers = amount(counts.prompts_differ, "answer follows", "answers follow")
        warnings.append(
            f"{answers} a prompt that the template writes differently in generation{_place(report, 'prompts_differ')}, "
            "such as one without the reasoning of earlier turns"
        )
    if counts.double_bos:
        conversations = amount(counts.double_bos, "conversation begins", "conversations begin")
        where = _place(report, "double_bos")
        warnings.append(f"{conversations} with two beginning-of-sequence tokens{where}: check the chat template")
    if counts.straddling:
        warnings.append(
            f"in {amount(counts.straddling, 'document')} a token spans the end of a prompt and the start of an "
            f"answer, and is trained on as part of the answer{_place(report, 'straddling')}"
        )
    if counts.special_in_text:
        documents = amount(
            counts.special_in_text,
            "document contains special tokens in its own text",
            "documents contain special tokens in their own text",
        )
        warnings.append(
            f"{documents}, which are read as such{_place(report, 'special_in_text')}: remove them, unless they are "
            "meant"
        )
    return warnings


def _inefficiencies(report: DataReport) -> list[str]:
    """Warnings about wasted computation."""
    counts, warnings = report.counts, []
    if report.samples and report.copies / report.samples > _SHARE_COPIES:
        share = report.copies / report.samples
        copies = "is a copy of another" if report.copies == 1 else "are copies of others"
        warnings.append(f"{report.copies:,} of {report.samples:,} {report.noun} ({share:.0%}) {copies}")
    if report.dataset_type == "prompts":
        return warnings
    if counts.tokens and counts.trained_tokens / counts.tokens < _SHARE_TRAINED:
        share = counts.trained_tokens / counts.tokens
        warnings.append(f"only {share:.1%} of the tokens are trained on: prompts are much longer than answers")
    if report.efficiency < _SHARE_FULL:
        remedy = "a shorter data.max_length wastes less" if report.packing else "data.packing=true would fill the rows"
        warnings.append(f"{1 - report.efficiency:.0%} of the positions are padding; {remedy}")
    if report.split == "train" and report.rows < report.batch_rows:
        warnings.append(
            f"an epoch has {amount(report.rows, 'row')}, fewer than the {report.batch_rows:,} of a batch: a smaller "
            "train.batch_size wastes less"
        )
    return warnings
