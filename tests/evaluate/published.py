"""Small benchmarks in the form in which the real ones are published."""

from __future__ import annotations

import csv
import json
import pathlib


def write_lines(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path: pathlib.Path, rows: list[list[str]]) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return path


ANIMALS = ["dog", "cat", "bird", "fish", "bear", "frog", "duck", "cow", "pig", "owl"]


def arc(folder: pathlib.Path) -> pathlib.Path:
    """AI2's own form."""
    rows = []
    for n, animal in enumerate(ANIMALS):
        texts = [f"a {animal}", "the big red ball", f"a happy little {ANIMALS[n - 1]} in the park", "mom"]
        choices = [{"text": text, "label": label} for text, label in zip(texts, "ABCD", strict=True)]
        stem = f"Once upon a time there was a {animal}. What did Lily see?"
        rows.append({"id": str(n), "question": {"stem": stem, "choices": choices}, "answerKey": "ABCD"[n % 4]})
    write_lines(folder / "arc/ARC-Easy-Train.jsonl", rows[::-1])
    return write_lines(folder / "arc/ARC-Easy-Test.jsonl", rows).parent


def hellaswag(folder: pathlib.Path) -> pathlib.Path:
    rows = [
        {
            "ind": n,
            "activity_label": "Playing",
            "ctx_a": f"A girl sees a {animal} near the tree.",
            "ctx_b": "she",
            "ctx": f"A girl sees a {animal} near the tree. she",
            "endings": [
                "runs to it and smiles.",
                "was very sad and cried.",
                "[title] eats the ball.",
                "flies to the moon.",
            ],
            "label": n % 4,
        }
        for n, animal in enumerate(ANIMALS)
    ]
    write_lines(folder / "hellaswag/hellaswag_train.jsonl", rows[::-1])
    return write_lines(folder / "hellaswag/hellaswag_val.jsonl", rows).parent


def gsm8k(folder: pathlib.Path) -> pathlib.Path:
    for split, count in (("train", 6), ("test", 6)):
        rows = [
            {
                "question": f"Tom has {n} toys and gets {n + 1} more. How many?",
                "answer": f"He has {2 * n + 1}.\n#### {2 * n + 1}",
            }
            for n in range(count)
        ]
        write_lines(folder / "gsm8k" / f"{split}.jsonl", rows)
    return folder / "gsm8k"


def perplexity(folder: pathlib.Path) -> pathlib.Path:
    story = "Once upon a time, there was a little girl named Lily. She liked to play in the park with her dog. "
    # The last one is longer than the small model's context.
    return write_lines(folder / "stories.jsonl", [{"text": story * n} for n in (1, 2, 30)])


def mmlu(folder: pathlib.Path) -> pathlib.Path:
    """Hendrycks' form: no header."""
    for subject in ("astronomy", "philosophy"):
        for split, count in (("dev", 5), ("test", 8)):
            rows = [
                [f"What is {a}?", "a toy", a, "a tree", "mom", "ABCD"[(n + len(split)) % 4]]
                for n, a in enumerate(ANIMALS[:count])
            ]
            write_csv(folder / "mmlu" / split / f"{subject}_{split}.csv", rows)
    return folder / "mmlu"


def ceval(folder: pathlib.Path) -> pathlib.Path:
    for split, count in (("dev", 5), ("val", 6)):
        rows = [["id", "question", "A", "B", "C", "D", "answer", "explanation"][: 8 if split == "dev" else 7]]
        rows += [
            [str(n), f"第{n}个问题是____", "一", "二", "三", "四", "ABCD"[n % 4], "因为"][: len(rows[0])]
            for n in range(count)
        ]
        write_csv(folder / "ceval" / split / f"accountant_{split}.csv", rows)
    return folder / "ceval"


def cmmlu(folder: pathlib.Path) -> pathlib.Path:
    for split, count in (("dev", 5), ("test", 6)):
        rows = [["", "Question", "A", "B", "C", "D", "Answer"]]
        rows += [[str(n), f"第{n}个问题是", "一", "二", "三", "四", "ABCD"[n % 4]] for n in range(count)]
        write_csv(folder / "cmmlu" / split / "agronomy.csv", rows)
    return folder / "cmmlu"
