"""Writes generated records as they come, without those that filters of all records drop, and a report."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np

from meshtune.config.data_recipe import DataRecipe
from meshtune.data.chat import as_dicts
from meshtune.data.mixing import draw as draw_numbers
from meshtune.errors import UserError, amount
from meshtune.evaluate.folder import replace, write_json
from meshtune.synth.asking import Outcome
from meshtune.synth.card import CARD, HELD_OUT, HELD_OUT_PAIRS, PAIRS, RECORD_FILES, RECORDS, REPORT, card
from meshtune.synth.filters import Dropped, Duplicates, MadeRecord, drop, evaluation_marks, record_marks
from meshtune.synth.maker import Spent, TaskResult, picture_copy
from meshtune.synth.plan import Plan, changed_sources
from meshtune.synth.subjects import read_conversations

DROPPED = "dropped.jsonl"
COUNTS_SECONDS = 1.0  # between two writes
EXAMPLES = 3  # of what a filter dropped
NEWEST = 3  # records that are shown while others are made


class Counts:
    """Counts records as they are made, with examples of those that filters dropped, in a file for whoever watches. The
    filters that compare all records come last, and are not in it."""

    def __init__(self, file: pathlib.Path):
        self._file, self._written = file, float("-inf")
        self._records = 0
        self._dropped: Counter[str] = Counter()
        self._examples: dict[str, list[dict[str, str]]] = {}
        self._newest: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=NEWEST)

    def add(self, result: TaskResult, spent: Spent) -> None:
        """Adds the result of a task; `spent` is what all have taken."""
        self._records += len(result.records)
        self._newest += [record.fields for record in result.records]
        for entry in result.dropped:
            self._dropped[entry.filter] += 1
            examples = self._examples.setdefault(entry.filter, [])
            if len(examples) < EXAMPLES:
                examples.append(_example(entry))
        if time.monotonic() - self._written > COUNTS_SECONDS:
            self._written = time.monotonic()
            fields = {
                "made": self._records + self._dropped.total(),
                "dropped": dict(self._dropped),
                "examples": self._examples,
                "newest": list(self._newest),
                "tokens": {"prompts": spent.prompt, "answers": spent.answer},
                "dollars": round(spent.dollars, 6),
            }
            with contextlib.suppress(OSError):  # nothing depends on it
                write_json(self._file, fields)

    def remove(self) -> None:
        """Removes the file, when the report is there."""
        self._file.unlink(missing_ok=True)


class Writer:
    """Writes the records of the tasks of a plan to a folder. Its files appear when it finishes."""

    def __init__(self, plan: Plan, folder: pathlib.Path):
        self._plan, self._folder = plan, folder
        filters = plan.recipe.filters
        self._duplicates = None if filters.duplicates is None else Duplicates(filters.duplicates)
        self._evaluation = evaluation_marks(filters) if filters.evaluation else frozenset()
        self._files: dict[str, BinaryIO] = {}
        self._counts, self._kinds, self._sources = Counter[str](), Counter[str](), Counter[str]()
        self._dropped, self._examples = Counter[str](), dict[str, list[dict[str, str]]]()

    def add(self, results: Iterable[TaskResult]) -> None:
        """Writes the records of the next tasks."""
        for result in results:
            for record in result.records:
                dropped = self._filter(record)
                if dropped is None:
                    self._add(record)
                else:
                    self._drop(dropped)
            for dropped in result.dropped:
                self._drop(dropped)

    def _filter(self, record: MadeRecord) -> Dropped | None:
        if self._duplicates is not None and (reason := self._duplicates.add(record)) is not None:
            return drop(record, "duplicates", reason)
        if self._evaluation and not self._evaluation.isdisjoint(record_marks(record)):
            return drop(record, "evaluation", "words of evaluation data")
        return None

    def _add(self, record: MadeRecord) -> None:
        names = (HELD_OUT, HELD_OUT_PAIRS) if record.held_out else (RECORDS, PAIRS)
        self._write(names[record.is_pair], record.fields)
        self._kinds[record.fields["provenance"]["kind"]] += 1
        self._sources[record.fields["provenance"]["source"]] += 1

    def _drop(self, dropped: Dropped) -> None:
        self._write(DROPPED, dataclasses.asdict(dropped))
        self._dropped[dropped.filter] += 1
        examples = self._examples.setdefault(dropped.filter, [])
        if len(examples) < EXAMPLES:
            examples.append(_example(dropped))

    def _write(self, name: str, fields: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = _draft(self._folder, name).open("wb")
        self._files[name].write((json.dumps(fields, ensure_ascii=False) + "\n").encode())
        self._counts[name] += 1

    def finish(self, outcome: Outcome, teacher: str) -> list[str]:
        """Mixes general data in and writes files and report; returns lines that sum it up. Raises UserError where no
        record is left."""
        plan, recipe, folder = self._plan, self._plan.recipe, self._folder
        total = sum(self._counts.values())
        conversations, left = self._counts[RECORDS], sum(self._kinds.values())
        general = _general(recipe, conversations)
        for row in general:
            self._write(RECORDS, row)
        self._copy_pictures()
        self.close()
        for name in (*RECORD_FILES, DROPPED):
            if name in self._files:
                os.replace(_draft(folder, name), folder / name)
            elif name == DROPPED:
                replace(folder / name, "")
            else:
                (folder / name).unlink(missing_ok=True)
        fields = {
            "recipe": describe_recipe(recipe),
            "teacher": teacher,
            "records": {name: self._counts[name] for name in RECORD_FILES if self._counts[name]},
            "kinds": dict(self._kinds),
            "sources": dict(self._sources),
            "made": total,
            "dropped": dict(self._dropped),
            "examples": self._examples,
            "general": len(general),
            "general_share": len(general) / self._counts[RECORDS] if general else 0.0,
            "skipped_documents": [list(entry) for entry in (plan.library.skipped if plan.library is not None else ())],
            "changed_sources": changed_sources(plan.digests),
            "requests": {"asked": outcome.requested, "of the journal": outcome.replayed},
            "tokens": {"prompts": outcome.spent.prompt, "answers": outcome.spent.answer},
            "dollars": round(outcome.spent.dollars, 6),
            "tasks": len(plan.tasks),
            "tasks_beyond_budget": len(plan.tasks) - outcome.within_budget,
            "failed": [f"{plan.tasks[number].name}: {text}" for number, text in sorted(outcome.failed.items())],
        }
        write_json(folder / REPORT, fields)
        replace(folder / CARD, card(fields))
        if not left:
            counts = ", ".join(f"{name} {count}" for name, count in self._dropped.items()) or "no answers"
            fix = "change filters, and go on with --resume: answers are not asked for twice"
            raise UserError(
                f"no record is left; dropped: {counts}", where=str(folder), fix=f"{folder / CARD} shows examples; {fix}"
            )
        return _summary(fields, folder)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()

    def _copy_pictures(self) -> None:
        for subject in self._plan.subjects:
            for picture in subject.pictures:
                copy = self._folder / picture_copy(picture, subject.sha256)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(picture, copy)


def _example(entry: Dropped) -> dict[str, str]:
    return {"reason": entry.reason, "text": entry.text[:400], "source": entry.source, "place": entry.place}


def describe_recipe(recipe: DataRecipe) -> dict[str, Any]:
    """The recipe's keys that are not the defaults."""
    return recipe.model_dump(mode="json", exclude_defaults=True)


def _draft(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / f".{name}.partial"


def _summary(fields: Mapping[str, Any], output: pathlib.Path) -> list[str]:
    lines = [f"{output / name}: {amount(count, 'record')}" for name, count in fields["records"].items()]
    if fields["general"]:
        lines.append(f"general data: {fields['general']} records, {fields['general_share']:.0%} of {RECORDS}")
    if fields["dropped"]:
        lines.append("dropped: " + ", ".join(f"{name} {count}" for name, count in fields["dropped"].items()))
    tokens = fields["tokens"]
    price = f", ${fields['dollars']:.4f}" if fields["dollars"] else ""
    lines.append(f"tokens: {tokens['prompts']:,} of prompts, {tokens['answers']:,} of answers{price}")
    if beyond := fields["tasks_beyond_budget"]:
        lines.append(f"the budget ended before {amount(beyond, 'request')}: raise it, and go on with --resume")
    if failed := fields["failed"]:
        lines.append(f"{amount(len(failed), 'request')} failed: ask again with --resume; the first: {failed[0]}")
    if changed := fields["changed_sources"]:
        lines.append(f"changed while records were made, which are of the earlier text: {', '.join(changed)}")
    return lines


def _general(recipe: DataRecipe, count: int) -> list[Mapping[str, Any]]:
    """General conversations, enough for their share next to `count` records, or all if there are too few."""
    if recipe.mix is None or not count:
        return []
    conversations = read_conversations(recipe.mix.data, "mix.data")
    number = min(len(conversations), round(count * recipe.mix.share / (1 - recipe.mix.share)))
    chosen = draw_numbers(len(conversations), number, np.random.default_rng([recipe.seed, 0x67656E]))
    rows: list[Mapping[str, Any]] = []
    for index in chosen.tolist():
        origin = conversations[index].origin
        tools = {"tools": [dict(tool) for tool in conversations[index].tools]} if conversations[index].tools else {}
        provenance = {"source": origin.source, "place": f"record {origin.record}", "kind": "general"}
        rows.append({"messages": as_dicts(conversations[index]), **tools, "provenance": provenance})
    return rows
