"""The tasks of an evaluation: examples from published files, subjects by category, and results.

Folders of subjects are Hendrycks' MMLU ({dev,test}/SUBJECT_{dev,test}.csv, with or without a header), C-Eval
({dev,val}/SUBJECT_{dev,val}.csv) and CMMLU ({dev,test}/SUBJECT.csv).
"""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshtune.data.sources import open_path
from meshtune.errors import UserError
from meshtune.json_text import read_bytes

LETTERS = ("A", "B", "C", "D")
Doc = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TaskFiles:
    """The examples of a task: those that are asked, and those that are shown before (few-shot)."""

    test: list[Doc]
    shots: list[Doc]


def read_task(name: str, path: pathlib.Path) -> dict[str, TaskFiles]:
    """The tasks that benchmark `name` at `path` has: one for each subject of a folder of subjects.

    Raises UserError for a path that does not exist, a file without examples, and an example that lacks a field.
    """
    if name in SPLITS:
        return {f"{name}_{subject}": files for subject, files in _read_subjects(name, path).items()}
    test, shots = (path, None) if path.is_file() else _files_of(path)
    return {name: TaskFiles(_read(test, DOCS[name]), _read(shots, DOCS[name]) if shots else [])}


# The splits that are asked, in order of preference.
SPLITS = {"mmlu": ("test", "val"), "ceval": ("val", "test"), "cmmlu": ("test",)}


def _read_subjects(name: str, folder: pathlib.Path) -> dict[str, TaskFiles]:
    split = next((split for split in SPLITS[name] if (folder / split).is_dir()), None)
    if split is None:
        listed = sorted(path.name for path in folder.iterdir())[:5] if folder.is_dir() else "nothing: it is no folder"
        raise UserError(
            f"{name} needs a folder with {' or '.join(SPLITS[name])}/ and, for few-shot, dev/; it holds {listed}",
            where=str(folder),
            fix="give the folder that was unpacked, with the .csv files of the subjects below dev/ and test/",
        )
    files = sorted((folder / split).glob("*.csv"))
    if not files:
        raise UserError(f"there is no .csv file in {split}/", where=str(folder / split), fix="give the published files")
    tasks = {}
    for file in files:
        subject = file.stem.removesuffix(f"_{split}")
        shots = next(
            (
                dev
                for dev in (folder / "dev" / f"{subject}_dev.csv", folder / "dev" / f"{subject}.csv")
                if dev.is_file()
            ),
            None,
        )
        test = _choices(file)
        if not test:
            raise UserError(f"subject {subject} has no examples", where=str(file), fix="remove the file, or fill it")
        tasks[subject] = TaskFiles(test, _choices(shots) if shots else [])
    return tasks


def _choices(file: pathlib.Path) -> list[Doc]:
    """The questions of a .csv file of a subject: {question, choices, answer (0 to 3)}."""
    try:
        text = read_bytes(file).decode("utf-8-sig")
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except (UnicodeDecodeError, csv.Error) as problem:
        raise UserError(
            f"this is no CSV in UTF-8: {problem}", where=str(file), fix="give the published file"
        ) from problem
    if not rows:
        return []
    header = [name.strip().lower() for name in rows[0]]
    columns = ["question", "a", "b", "c", "d", "answer"]
    if "question" not in header and len(rows[0]) == 6 and rows[0][5].strip() in LETTERS:
        return [_question(row, list(range(6)), file, number) for number, row in enumerate(rows)]  # without a header
    if "choice0" in header:
        columns = ["question", "choice0", "choice1", "choice2", "choice3", "answer"]
    if missing := [name for name in columns if name not in header]:
        raise UserError(
            f"there is no column '{missing[0]}'; there are {', '.join(rows[0])}",
            where=str(file),
            fix=f"the columns are {', '.join(columns)}, or six without a header",
        )
    return [
        _question(row, [header.index(name) for name in columns], file, number) for number, row in enumerate(rows[1:])
    ]


def _question(row: Sequence[str], at: Sequence[int], file: pathlib.Path, number: int) -> Doc:
    where = f"{file}, record {number}"
    if len(row) <= max(at):
        raise UserError(f"the record has {len(row)} columns, not {max(at) + 1}", where=where, fix="complete it")
    question, *choices, answer = (row[column].strip() for column in at)
    if answer not in (*LETTERS, "0", "1", "2", "3"):
        raise UserError(f"the answer is '{answer}'", where=where, fix="give A, B, C or D")
    return {
        "question": question,
        "choices": choices,
        "answer": LETTERS.index(answer) if answer in LETTERS else int(answer),
    }


def _files_of(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path | None]:
    """The file that is asked and that of the few-shot examples, of a folder with one per split."""
    if not folder.is_dir():
        raise UserError("no such file or folder", where=str(folder), fix="check the path after NAME=")
    files = {
        file.stem.rpartition("-")[0] if "-of-" in file.name else file.stem: file for file in sorted(folder.iterdir())
    }
    by_split = {key: file for key, file in files.items() if file.suffix in (".json", ".jsonl", ".parquet", ".csv")}

    def of(*names: str) -> pathlib.Path | None:
        return next((file for name in names for key, file in by_split.items() if name in key.lower()), None)

    test = of("test", "val", "dev")
    if test is None:
        raise UserError(
            f"no file of the folder is a test or validation split: {', '.join(files) or 'it is empty'}",
            where=str(folder),
            fix="name the file itself, or give a folder with test.jsonl (and train.jsonl for few-shot examples)",
        )
    return test, of("train")


def _read(file: pathlib.Path, convert: Callable[[Mapping[str, Any]], Doc]) -> list[Doc]:
    records = open_path(file, str(file))
    docs = []
    for number in range(len(records)):
        record = records[number]
        where = f"{file}, record {number}"
        if isinstance(record, UserError):
            raise record
        try:
            docs.append(convert(record))  # pyright: ignore[reportArgumentType]
        except (KeyError, TypeError, ValueError, IndexError) as problem:
            named = (
                f"there is no field {problem}"
                if isinstance(problem, KeyError)
                else f"a field is not as published: {problem}"
            )
            fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise UserError(
                f"{named}; there are: {fields}", where=where, fix="give the file as it is published"
            ) from problem
    if not docs:
        raise UserError("the file has no examples", where=str(file), fix="give the published file")
    return docs


def _arc(record: Mapping[str, Any]) -> Doc:
    """AI2's own form, the hub's, or {query, choices, gold} with only the answers."""
    if "query" in record:
        labels = [chr(ord("A") + n) for n in range(len(record["choices"]))]
        choices = {"text": list(record["choices"]), "label": labels}
        question = record["query"].removeprefix("Question: ")
        return {"question": question, "choices": choices, "answerKey": labels[record["gold"]]}
    question, choices = record["question"], record.get("choices")
    if isinstance(question, Mapping):
        question, choices = question["stem"], question["choices"]
    if isinstance(choices, list):
        choices = {name: [choice[name] for choice in choices] for name in ("text", "label")}
    if choices is None:
        raise KeyError("choices")
    doc = {"question": question, "choices": dict(choices), "answerKey": record["answerKey"]}
    doc["choices"]["label"].index(doc["answerKey"])
    return doc


def _hellaswag(record: Mapping[str, Any]) -> Doc:
    doc = {name: record[name] for name in ("activity_label", "ctx_a", "ctx_b", "endings", "label")}
    return doc | {"endings": list(doc["endings"]), "label": str(int(doc["label"]))}


def _gsm8k(record: Mapping[str, Any]) -> Doc:
    return {"question": str(record["question"]), "answer": str(record["answer"])}


def _ifeval(record: Mapping[str, Any]) -> Doc:
    doc = {name: record[name] for name in ("key", "prompt", "instruction_id_list", "kwargs")}
    kwargs = [{key: value for key, value in options.items() if value is not None} for options in doc["kwargs"]]
    return doc | {"kwargs": kwargs}


def _text(record: Mapping[str, Any]) -> Doc:
    return {"text": str(record["text"])}


DOCS: dict[str, Callable[[Mapping[str, Any]], Doc]] = {
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "hellaswag": _hellaswag,
    "gsm8k": _gsm8k,
    "ifeval": _ifeval,
    "perplexity": _text,
}
FROM_FILES = (*SPLITS, *DOCS)


CATEGORIES = ("STEM", "Social Sciences", "Humanities", "Other")
# Benchmark -> category -> names of subjects in files; a subject of no category counts as Other.
SUBJECTS = {
    "mmlu": {
        "STEM": """abstract_algebra astronomy college_biology college_chemistry college_computer_science
            college_mathematics college_physics computer_security conceptual_physics electrical_engineering
            elementary_mathematics high_school_biology high_school_chemistry high_school_computer_science
            high_school_mathematics high_school_physics high_school_statistics machine_learning""",
        "Social Sciences": """econometrics high_school_geography high_school_government_and_politics
            high_school_macroeconomics high_school_microeconomics high_school_psychology human_sexuality
            professional_psychology public_relations security_studies sociology us_foreign_policy""",
        "Humanities": """formal_logic high_school_european_history high_school_us_history high_school_world_history
            international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy prehistory
            professional_law world_religions""",
    },
    "ceval": {
        "STEM": """advanced_mathematics college_chemistry college_physics college_programming computer_architecture
            computer_network discrete_mathematics electrical_engineer high_school_biology high_school_chemistry
            high_school_mathematics high_school_physics metrology_engineer middle_school_biology middle_school_chemistry
            middle_school_mathematics middle_school_physics operating_system probability_and_statistics
            veterinary_medicine""",
        "Social Sciences": """business_administration college_economics education_science high_school_geography
            high_school_politics mao_zedong_thought marxism middle_school_geography middle_school_politics
            teacher_qualification""",
        "Humanities": """art_studies chinese_language_and_literature high_school_chinese high_school_history
            ideological_and_moral_cultivation law legal_professional logic middle_school_history modern_chinese_history
            professional_tour_guide""",
    },
    "cmmlu": {
        "STEM": """anatomy astronomy college_actuarial_science college_engineering_hydrology college_mathematics
            college_medical_statistics computer_science conceptual_physics electrical_engineering elementary_mathematics
            genetics high_school_biology high_school_chemistry high_school_mathematics high_school_physics
            machine_learning virology""",
        "Social Sciences": """ancient_chinese business_ethics chinese_civil_service_exam chinese_food_culture
            chinese_foreign_policy chinese_teacher_qualification college_education economics education
            elementary_chinese ethnology high_school_geography high_school_politics journalism management marketing
            modern_chinese professional_accounting professional_psychology public_relations security_study sociology""",
        "Humanities": """arts chinese_history chinese_literature college_law global_facts international_law
            jurisprudence logical marxist_theory philosophy professional_law world_history world_religions""",
    },
}


def category_of(benchmark: str, subject: str) -> str:
    return next((name for name, listed in SUBJECTS[benchmark].items() if subject in listed.split()), "Other")


Value = float | tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One example: its id in the task, the prompt, the right answer, the model's, and its part of each metric: a
    number, or (sum, weight) for a metric that is a ratio."""

    id: str
    prompt: str
    target: str
    answer: Any
    metrics: Mapping[str, Value]


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """The metrics of a task, as fractions where they are shares, by name and filter ("acc,none")."""

    name: str
    benchmark: str
    category: str
    metrics: Mapping[str, float]
    samples: Sequence[Sample]
    higher_is_better: Mapping[str, bool] = dataclasses.field(default_factory=dict)


def averages(results: Sequence[TaskResult]) -> dict[str, dict[str, float]]:
    """The means over all samples of a benchmark's subjects, by category and in all: {"mmlu": {"acc, STEM": ..}}."""
    table: dict[str, dict[str, float]] = {}
    for benchmark in dict.fromkeys(result.benchmark for result in results if result.category):
        subjects = [result for result in results if result.benchmark == benchmark]
        for name in subjects[0].metrics:
            for category in ("Average", *CATEGORIES):
                counted = [result for result in subjects if category in ("Average", result.category)]
                values = [
                    sample.metrics[name] for result in counted for sample in result.samples if name in sample.metrics
                ]
                if values:
                    table.setdefault(benchmark, {})[f"{name.split(',')[0]}, {category}"] = float(
                        np.mean(np.asarray(values))
                    )
    return table
