"""Answers to a data set, with metrics against its own answers and the loss on them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from meshtune.errors import UserError
from meshtune.evaluate.answers import ROWS, Prompt, answers
from meshtune.evaluate.folder import PREDICTIONS, TOTALS, read_lines, results_folder, write_json, write_lines
from meshtune.evaluate.held_out import HeldOut, held_out_loss
from meshtune.evaluate.metrics import METRICS, check_metrics, record_metrics, total_metrics
from meshtune.evaluate.progress import show_progress
from meshtune.evaluate.records import Record, digest, prompt_ids
from meshtune.generate.api import Model
from meshtune.generate.config import Sampling
from meshtune.generate.prompts import turn_end

DEFAULT_TOKENS = 512  # of an answer, at most


@dataclasses.dataclass(frozen=True)
class PredictOptions:
    """How a data set is answered and compared. `max_tokens` of an answer at most (None: 512, or what the context has
    room for); `loss`: also the loss on the data's own answers; `rows` are computed at once."""

    metrics: tuple[str, ...] = METRICS
    loss: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    rows: int = ROWS


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The rows of predictions.jsonl, and the totals of metrics.json."""

    rows: list[dict[str, Any]]
    totals: dict[str, Any]


def predict(
    model: Model,
    records: Sequence[Record],
    output: pathlib.Path,
    options: PredictOptions = PredictOptions(),
    *,
    identity: str,
    resume: bool = False,
    overwrite: bool = False,
    console: Console,
) -> Predictions:
    """Answers every record into `output`/predictions.jsonl, line by line as answers are complete, and
    compares them in metrics.json.

    `identity` says whose answers they are. With `resume` answers that are in the folder already stay.
    Raises UserError as results_folder and check_metrics do, and for a prompt that leaves no room for an
    answer, before anything is computed.
    """
    check_metrics(options.metrics)
    prompts = make_prompts(model, records, options)
    settings = {
        "model": identity,
        "data": digest(records),
        "records": len(records),
        "sampling": dataclasses.asdict(options.sampling),
        "max_tokens": options.max_tokens,
        "stop": list(options.stop),
        "dtype": model.compute.dtype,
    }
    with results_folder(output, settings, resume=resume, overwrite=overwrite) as aside:
        if aside is not None:
            console.print(f"the old results are now in {aside}", soft_wrap=True)
        return predict_into(model, records, prompts, output, options, console)


def predict_into(
    model: Model,
    records: Sequence[Record],
    prompts: Sequence[Prompt],
    folder: pathlib.Path,
    options: PredictOptions,
    console: Console,
) -> Predictions:
    """Answers records into a folder that is this process's; answers that are there already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = _generate_answers(model, records, prompts, options, folder / PREDICTIONS, console)
    held_out = None
    if options.loss:
        with show_progress(console, "loss") as progress:
            held_out = held_out_loss(model, records, progress=progress)
    result = score_answers(rows, options.metrics, held_out)
    write_lines(folder / PREDICTIONS, result.rows)
    write_json(folder / TOTALS, result.totals)
    return result


def make_prompts(model: Model, records: Sequence[Record], options: PredictOptions) -> list[Prompt]:
    """The requests to the engine. Raises UserError for a prompt that is too long, naming the record."""
    prompts = []
    for record in records:
        ids = prompt_ids(model.tokenizer, record)
        turn_ids, turn_strings = (frozenset(), ()) if isinstance(record.prompt, str) else turn_end(model.tokenizer)
        room = model.engine.context - len(ids)
        if room < (options.max_tokens or 1):
            raise UserError(
                f"the prompt has {len(ids)} tokens and the model's context {model.engine.context}, so there is no room "
                f"for an answer of {options.max_tokens or 1}",
                where=record.origin,
                fix="shorten or remove the record, or give a smaller --max-tokens",
            )
        request = model.engine.request(
            ids,
            options.sampling.of_row(record.number),
            max_tokens=options.max_tokens or min(DEFAULT_TOKENS, room),
            stop_ids=model.stop_ids | turn_ids,
            where=record.origin,
        )
        stop = (*options.stop, *turn_strings)
        prompts.append(Prompt(request, stop, continued=isinstance(record.prompt, str), name=record.origin))
    return prompts


def _generate_answers(
    model: Model,
    records: Sequence[Record],
    prompts: Sequence[Prompt],
    options: PredictOptions,
    file: pathlib.Path,
    console: Console,
) -> list[dict[str, Any]]:
    """The answers, those that `file` has already and new ones, which are added to it."""
    rows = {row["record"]: row for row in read_lines(file)}
    write_lines(file, rows.values())  # without a line that was cut off
    pairs = zip(records, prompts, strict=True)
    remaining = [(record, prompt) for record, prompt in pairs if record.number not in rows]
    if rows:
        console.print(f"{len(rows)} of {len(records)} records have an answer already")
    with file.open("a", encoding="utf-8") as lines, show_progress(console, "answers") as progress:
        texts = [prompt for _, prompt in remaining]
        for number, answer in answers(model.engine, model.tokenizer, texts, rows=options.rows):
            record, _ = remaining[number]
            rows[record.number] = {
                "record": record.number,
                "origin": record.origin,
                "prompt": record.prompt,
                "reference": record.reference,
                "answer": answer.text,
                "tokens": answer.tokens,
                "finish_reason": answer.finish_reason,
            }
            lines.write(json.dumps(rows[record.number], ensure_ascii=False, default=str) + "\n")
            lines.flush()
            progress(len(rows), len(records))
    return [rows[record.number] for record in records]


def score_answers(rows: Sequence[dict[str, Any]], metrics: Sequence[str], held_out: HeldOut | None) -> Predictions:
    """Answers with their metrics, and the totals."""
    texts, references = [row["answer"] for row in rows], [row["reference"] for row in rows]
    by_record = record_metrics(metrics, texts, references)
    losses = held_out.records if held_out else [None] * len(rows)
    counts = held_out.tokens if held_out else [0] * len(rows)
    full = [
        row | {"metrics": values} | ({"loss": loss, "loss_tokens": tokens} if held_out else {})
        for row, values, loss, tokens in zip(rows, by_record, losses, counts, strict=True)
    ]
    totals: dict[str, Any] = {
        "records": len(rows),
        "cut_at_max_tokens": sum(r["finish_reason"] == "length" for r in rows),
    }
    totals |= total_metrics(metrics, texts, references, by_record)
    if held_out:
        totals |= {"loss": held_out.loss, "loss_tokens": sum(held_out.tokens), "loss_truncated": held_out.truncated}
    return Predictions(full, totals)
