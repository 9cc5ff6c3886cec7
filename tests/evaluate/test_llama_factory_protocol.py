"""LLaMA-Factory's protocol for MMLU, C-Eval and CMMLU against a second writing of it over transformers.

The second one reads the .csv files by itself, writes the prompts by transformers' chat templates, takes the letter by
the logits of a transformers model, and averages over questions. It shares the order of the examples, which
LLaMA-Factory draws without a seed.
"""

from __future__ import annotations

import csv
import pathlib

import numpy as np
import published
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import meshtune
from meshtune.evaluate.choice_letters import read_subjects, run_protocol
from meshtune.evaluate.harness import Suite
from meshtune.evaluate.results import averages
from meshtune.terminal import console

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SHOTS, SEED = 3, 1234
CHINESE = ("以下是中国关于{}考试的单项选择题，请选出其中的正确答案。\n\n", "\n答案：")
WORDING = {
    "mmlu": ("The following are multiple choice questions (with answers) about {}.\n\n", "\nAnswer:"),
    "ceval": CHINESE,
    "cmmlu": CHINESE,
}
# (benchmark, file name, name in prompts, category, questions): the benchmarks' own lists of subjects say so.
SUBJECTS = [
    ("mmlu", "astronomy", "astronomy", "STEM", 7),
    ("mmlu", "college_biology", "college biology", "STEM", 2),
    ("mmlu", "moral_disputes", "moral disputes", "Humanities", 4),
    ("mmlu", "sociology", "sociology", "Social Sciences", 3),
    ("mmlu", "virology", "virology", "Other", 5),
    ("ceval", "accountant", "注册会计师", "Other", 5),
    ("ceval", "law", "法学", "Humanities", 3),
    ("cmmlu", "agronomy", "农学", "Other", 4),
    ("cmmlu", "virology", "病毒学", "STEM", 3),
]
SPLIT = {"mmlu": "test", "ceval": "val", "cmmlu": "test"}


def question(rng: np.random.Generator, benchmark: str, number: int) -> list[str]:
    """Question, four choices and the right letter."""
    words = published.ANIMALS if benchmark == "mmlu" else list("山水人火木")
    first, *choices = (str(word) for word in rng.choice(words, 5, replace=benchmark == "mmlu"))
    asked = f"What is a {first}, {number}?" if benchmark == "mmlu" else f"第{number}题，{first}是"
    return [asked, *choices, "ABCD"[rng.integers(4)]]


def write_benchmarks(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    rng = np.random.default_rng(1)
    for benchmark, subject, _, _, count in SUBJECTS:
        for split, size in (("dev", 5), (SPLIT[benchmark], count)):
            rows = [question(rng, benchmark, number) for number in range(size)]
            if benchmark != "mmlu":
                head = "id,question,A,B,C,D,answer" if benchmark == "ceval" else ",Question,A,B,C,D,Answer"
                rows = [head.split(","), *([str(number), *row] for number, row in enumerate(rows))]
            name = f"{subject}.csv" if benchmark == "cmmlu" else f"{subject}_{split}.csv"
            published.write_csv(folder / benchmark / split / name, rows)
    return {benchmark: folder / benchmark for benchmark in WORDING}


def read(folder: pathlib.Path, benchmark: str, split: str, subject: str) -> list[list[str]]:
    name = f"{subject}.csv" if benchmark == "cmmlu" else f"{subject}_{split}.csv"
    with (folder / benchmark / split / name).open(encoding="utf-8", newline="") as stream:
        rows = list(csv.reader(stream))
    return rows if benchmark == "mmlu" else [row[1:] for row in rows[1:]]


def user_turn(row: list[str], ending: str) -> str:
    asked, a, b, c, d, _ = row
    return f"{asked}\nA. {a}\nB. {b}\nC. {c}\nD. {d}{ending}"


def by_transformers(path: pathlib.Path, folder: pathlib.Path) -> dict[str, list[tuple[str, str, bool]]]:
    """(prompt, chosen letter, whether it is right) of every question, by benchmark and subject."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    letters = [tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "ABCD"]
    results = {}
    for benchmark, subject, name, _, _ in SUBJECTS:
        opening, ending = WORDING[benchmark]
        examples, answers = read(folder, benchmark, "dev", subject), []
        for number, row in enumerate(read(folder, benchmark, SPLIT[benchmark], subject)):
            order = np.random.default_rng([SEED, number]).permutation(len(examples))[:SHOTS]
            turns = []
            for example in [examples[index] for index in order]:
                turns += [("user", user_turn(example, ending)), ("assistant", example[5])]
            turns.append(("user", user_turn(row, ending)))
            turns[0] = ("user", opening.format(name) + turns[0][1])
            messages = [{"role": role, "content": content} for role, content in turns]
            options = {"chat_template": TEMPLATE, "add_generation_prompt": True}
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                last = model(ids).logits[0, -1]
            letter = "ABCD"[int(last[letters].argmax())]
            answers.append((prompt, letter, letter == row[5]))
        results[f"{benchmark}_{subject}"] = answers
    return results


def random_model(tokenizer: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A random model with a real tokenizer: small trained ones choose one letter whatever is asked."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def test_prompts_letters_and_averages_are_those_of_a_second_writing_over_transformers(
    stories260k: pathlib.Path, tmp_path: pathlib.Path
):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    files = write_benchmarks(tmp_path)
    suite = Suite(tuple(files), files, shots=SHOTS, seed=SEED)
    path = random_model(stories260k, tmp_path / "model")
    model = meshtune.load(path, chat_template=str(template))
    results = run_protocol(model, suite, read_subjects(suite), console=console(quiet=True))
    expected = by_transformers(path, tmp_path)
    assert {result.name for result in results} == set(expected)
    categories = {f"{benchmark}_{subject}": category for benchmark, subject, _, category, _ in SUBJECTS}
    for result in results:
        assert result.category == categories[result.name]
        ours = [(sample.prompt, sample.answer, bool(sample.metrics["acc,letters"])) for sample in result.samples]
        assert ours == expected[result.name], result.name
    assert len({letter for answers in expected.values() for _, letter, _ in answers}) >= 3
    table = averages(results)
    for benchmark in WORDING:
        for category in ("Average", "STEM", "Social Sciences", "Humanities", "Other"):
            counted = [n for n, c in categories.items() if n.startswith(f"{benchmark}_") and category in ("Average", c)]
            right = [correct for name in counted for _, _, correct in expected[name]]
            if right:  # a mean over questions, not over subjects
                assert table[benchmark][f"acc, {category}"] == pytest.approx(sum(right) / len(right))
            else:
                assert f"acc, {category}" not in table[benchmark]
    whole, mean = table["mmlu"]["acc, Average"], [r.metrics["acc,letters"] for r in results if r.benchmark == "mmlu"]
    assert whole != pytest.approx(np.mean(mean)), "the subjects are of one size: the two means could not be told apart"
