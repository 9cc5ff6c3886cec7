"""Answers a data set in blocks of records, which replicas share, a restart keeps, and memory holds one of.

The last bits of an answer depend on the records that are computed with it. So a block of RECORDS consecutive records
is computed from an empty batch, and its file appears once it is complete: the answers are the same bits whichever
process computes which block, and however often one is killed.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from rich.console import Console

from meshtune.errors import UserError
from meshtune.evaluate.folder import (
    PREDICTIONS,
    TOTALS,
    Report,
    join_complete,
    read_json,
    read_lines,
    results_folder,
    show_progress,
    write_json,
)
from meshtune.evaluate.metrics import check_metrics, corpus_scores, corpus_statistics, is_chinese, record_metrics
from meshtune.evaluate.predict import (
    HeldOut,
    Predictions,
    PredictOptions,
    Prompt,
    Record,
    answers,
    held_out_loss,
    make_prompts,
    picture_digests,
)
from meshtune.generate.api import Model
from meshtune.options import Shard

RECORDS = 256  # of a block: a multiple of the rows of a batch, so that few of them are idle at its end
BLOCKS = "blocks"

Row = dict[str, Any]  # of predictions.jsonl


class JsonLines(Sequence[Row]):
    """The rows of a file of JSON lines, read on access; where they begin is in memory, 8 bytes each."""

    def __init__(self, path: pathlib.Path):
        self._path, self._starts = path, array.array("q", [0])
        with path.open("rb") as file:
            for line in file:
                self._starts.append(self._starts[-1] + len(line))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        with self._path.open("rb") as file:
            file.seek(self._starts[number])
            return json.loads(file.readline())

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            yield from map(json.loads, file)


class Blocks:
    """The blocks of `records` in `folder`, of which this process computes those of `shard`."""

    def __init__(
        self, folder: pathlib.Path, records: Sequence[Record], options: PredictOptions, shard: Shard = Shard()
    ):
        self.folder, self.records, self.options, self.shard = folder, records, options, shard
        self.count = math.ceil(len(records) / RECORDS)
        self.numbers = [number for number in range(self.count) if shard.takes(number)]
        self._latest: tuple[int, list[Prompt]] | None = None
        # Cut into words as the first block is, so that every process does the same without having read the others.
        self._chinese = functools.cache(lambda: is_chinese([record.reference for record in self.block(0)]))

    def block(self, number: int) -> list[Record]:
        """Reads the records of a block."""
        return [self.records[index] for index in self._span(number)]

    def check(self, model: Model, console: Console, *, resume: bool) -> None:
        """Reads the records of this shard and makes their prompts, before anything is computed.

        With `resume`, compares the records with those of answers in the folder. Raises: UserError for a record that
        cannot be answered, and for answers to other records.
        """
        with show_progress(console, "checking") as progress:
            for done, number in enumerate(self.numbers):
                rows = self._read_rows(number) if resume else None
                if rows is None:
                    self.prompts(model, number)
                else:
                    _check_same(rows, self.block(number), self.folder)
                progress(done + 1, len(self.numbers))

    def compute(self, model: Model, console: Console) -> None:
        """Computes the blocks of this shard that the folder does not have."""
        (self.folder / BLOCKS).mkdir(parents=True, exist_ok=True)
        total = sum(len(self._span(number)) for number in self.numbers)
        done = 0
        with show_progress(console, "answers") as progress:
            for number in self.numbers:
                self._compute(model, number, lambda answered, _, done=done: progress(done + answered, total))
                done += len(self._span(number))
                progress(done, total)

    @property
    def is_joined(self) -> bool:
        """Whether the folder has the answers to all records in one file."""
        return (self.folder / TOTALS).is_file() and not (self.folder / BLOCKS).is_dir()

    def missing(self) -> list[int]:
        """The numbers of the blocks, of any shard, that are not complete."""
        if self.is_joined:
            return []
        return [number for number in range(self.count) if not self._file(number).is_file()]

    def join(self) -> Predictions:
        """Joins all blocks in predictions.jsonl and metrics.json, and removes them."""
        if self.is_joined:
            return Predictions(JsonLines(self.folder / PREDICTIONS), read_json(self.folder / TOTALS))
        summaries, draft = [], self.folder / f".{PREDICTIONS}.partial"
        with draft.open("wb") as joined:
            for number in range(self.count):
                *rows, summary = self._file(number).read_bytes().splitlines(keepends=True)
                joined.writelines(rows)
                summaries.append(json.loads(summary))
        totals = _totals(summaries)
        os.replace(draft, self.folder / PREDICTIONS)
        write_json(self.folder / TOTALS, totals)
        joined_blocks = self.folder / f".{BLOCKS}.partial"  # renamed at once, so that they are there or not
        os.rename(self.folder / BLOCKS, joined_blocks)
        shutil.rmtree(joined_blocks)
        return self.join()

    def prompts(self, model: Model, number: int) -> list[Prompt]:
        """Makes the prompts of a block; those of the last are in memory, which is the only one of a small data set."""
        if self._latest is None or self._latest[0] != number:
            self._latest = number, make_prompts(model, self.block(number), self.options)
        return self._latest[1]

    def _span(self, number: int) -> range:
        return range(number * RECORDS, min((number + 1) * RECORDS, len(self.records)))

    def _file(self, number: int) -> pathlib.Path:
        return self.folder / BLOCKS / f"{number:06}.jsonl"

    def _read_rows(self, number: int) -> list[Row] | None:
        """The rows of a block that an earlier process has computed."""
        if self._file(number).is_file():
            return read_lines(self._file(number))[:-1]
        if (self.folder / TOTALS).is_file() and (self.folder / PREDICTIONS).is_file():
            return self._joined[self._span(number).start : self._span(number).stop]
        return None

    @functools.cached_property
    def _joined(self) -> JsonLines:
        return JsonLines(self.folder / PREDICTIONS)

    def _compute(self, model: Model, number: int, progress: Report) -> None:
        options, file = self.options, self._file(number)
        summary = read_lines(file)[-1] if file.is_file() else None
        settings = {"metrics": list(options.metrics), "loss": options.loss}
        if summary is not None and {name: summary[name] for name in settings} == settings:
            return
        records, rows = self.block(number), self._read_rows(number)
        if rows is None:
            rows = _answer(model, records, self.prompts(model, number), options, progress)
        held_out = held_out_loss(model, records) if options.loss else None
        rows, summary = _score(rows, options, held_out, chinese=self._chinese())
        draft = file.with_name(f".{file.name}.{os.getpid()}.partial")
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in [*rows, settings | summary]]
        draft.write_text("".join(lines), encoding="utf-8")
        os.replace(draft, file)


def predict(
    model: Model,
    records: Sequence[Record],
    output: pathlib.Path,
    options: PredictOptions = PredictOptions(),
    *,
    identity: str,
    shard: Shard = Shard(),
    resume: bool = False,
    overwrite: bool = False,
    console: Console,
) -> Predictions | None:
    """Answers the records of a shard into `output`. Once no shard is missing, joins all in predictions.jsonl, and
    their metrics in metrics.json; returns None before.

    `identity` says whose answers they are. With `resume`, and always of a shard, blocks of answers that are in the
    folder stay. Raises UserError as results_folder and check_metrics do, and for a prompt that leaves no room for an
    answer, before anything is computed.
    """
    check_metrics(options.metrics)
    blocks = Blocks(output, records, options, shard)
    blocks.check(model, console, resume=(resume or shard.count > 1) and not overwrite)
    settings = {
        "model": identity,
        "records": len(records),
        "sampling": dataclasses.asdict(options.sampling),
        "max_tokens": options.max_tokens,
        "stop": list(options.stop),
        "rows": options.rows,
        "dtype": model.compute.dtype,
    }
    with results_folder(output, settings, resume=resume, overwrite=overwrite, shard=shard) as aside:
        if aside is not None:
            console.print(f"the old results are now in {aside}", soft_wrap=True)
        if shard.count > 1 and blocks.is_joined:
            return blocks.join()
        blocks.compute(model, console)
        return join_complete(output, shard, blocks.missing, blocks.join, console)


def _check_same(rows: Sequence[Row], records: Sequence[Record], folder: pathlib.Path) -> None:
    expected = [_fields_of(record) for record in records]
    for row, fields in zip(rows, json.loads(json.dumps(expected, default=str)), strict=False):
        if any(row.get(name) != fields.get(name) for name in ("prompt", "reference", "pictures")):
            raise UserError(
                f"these results are of other data: record {row.get('record')} was another",
                where=str(folder),
                fix="give the same data as before, or another --output; --overwrite moves these results aside",
            )
    if len(rows) != len(records):
        raise UserError(
            "these results are of other data: there were another number of records",
            where=str(folder),
            fix="give the same data as before, or another --output; --overwrite moves these results aside",
        )


def _fields_of(record: Record) -> Row:
    pictures = picture_digests(record)
    fields = {"record": record.number, "origin": record.origin, "prompt": record.prompt, "reference": record.reference}
    return fields | ({"pictures": pictures} if pictures else {})


def _answer(
    model: Model, records: Sequence[Record], prompts: Sequence[Prompt], options: PredictOptions, progress: Report
) -> list[Row]:
    rows: dict[int, Row] = {}
    for number, answer in answers(model.engine, model.tokenizer, prompts, rows=options.rows):
        rows[number] = _fields_of(records[number]) | {
            "answer": answer.text,
            "tokens": answer.tokens,
            "finish_reason": answer.finish_reason,
        }
        progress(len(rows), len(records))
    return [rows[number] for number in range(len(records))]


def _score(
    rows: Sequence[Row], options: PredictOptions, held_out: HeldOut | None, *, chinese: bool
) -> tuple[list[Row], Row]:
    """The answers with their metrics and losses, and their part of `_totals`."""
    texts, references = [row["answer"] for row in rows], [row["reference"] for row in rows]
    by_record = record_metrics(options.metrics, texts, references, chinese=chinese)
    scored = [row | {"metrics": values} for row, values in zip(rows, by_record, strict=True)]
    if held_out is not None:
        pairs = zip(scored, held_out.records, held_out.tokens, strict=True)
        scored = [row | {"loss": loss, "loss_tokens": tokens} for row, loss, tokens in pairs]
    else:
        scored = [{name: value for name, value in row.items() if not name.startswith("loss")} for row in scored]
    summary = {
        "records": len(rows),
        "cut_at_max_tokens": sum(row["finish_reason"] == "length" for row in rows),
        "sums": {name: math.fsum(values[name] for values in by_record) for name in by_record[0]},
        "statistics": corpus_statistics(options.metrics, texts, references, chinese=chinese),
    }
    if held_out is not None:
        fields = {"nats": held_out.nats, "weight": held_out.weight}
        summary["held_out"] = fields | {"tokens": sum(held_out.tokens), "truncated": held_out.truncated}
    return scored, summary


def _totals(summaries: Sequence[Mapping[str, Any]]) -> Row:
    records = sum(summary["records"] for summary in summaries)
    totals: Row = {"records": records, "cut_at_max_tokens": sum(summary["cut_at_max_tokens"] for summary in summaries)}
    for name in summaries[0]["sums"]:
        totals[name] = math.fsum(summary["sums"][name] for summary in summaries) / records
    totals |= corpus_scores([summary["statistics"] for summary in summaries])
    parts = [summary["held_out"] for summary in summaries if "held_out" in summary]
    if parts:
        nats, weight, tokens, truncated = (
            math.fsum(part[name] for part in parts) for name in ("nats", "weight", "tokens", "truncated")
        )
        if not weight:
            raise UserError(
                "the data have no answer to compute a loss of",
                fix="see `meshtune data inspect`, or leave the loss out: --resume --no-loss",
            )
        totals |= {"loss": nats / weight, "loss_tokens": int(tokens), "loss_truncated": int(truncated)}
    return totals
