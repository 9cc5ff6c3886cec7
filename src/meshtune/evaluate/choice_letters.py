"""LLaMA-Factory's protocol for MMLU, C-Eval and CMMLU: examples as turns of a chat, the likeliest of four letters.

Each question follows `shots` examples of its subject, in an order of its own. LLaMA-Factory draws that order without a
seed; here it depends on the seed and the number of the question alone.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console

from meshtune.data.chat import template_error
from meshtune.errors import UserError
from meshtune.evaluate.harness import Suite
from meshtune.evaluate.progress import shown
from meshtune.evaluate.results import Sample, TaskResult
from meshtune.evaluate.subjects import subject_of
from meshtune.evaluate.task_files import LETTERS, SPLITS, Doc, TaskFiles, read_task
from meshtune.generate.api import Model
from meshtune.generate.prefix_tree import ScoredText
from meshtune.generate.prompts import chat_template

SHOTS = 5
SYSTEM = {
    "mmlu": "The following are multiple choice questions (with answers) about {}.\n\n",
    "ceval": "以下是中国关于{}考试的单项选择题，请选出其中的正确答案。\n\n",
}
SYSTEM["cmmlu"] = SYSTEM["ceval"]
ANSWER = {"mmlu": "\nAnswer:", "ceval": "\n答案：", "cmmlu": "\n答案："}


def read_subjects(suite: Suite) -> dict[str, dict[str, TaskFiles]]:
    """The subjects of each benchmark of a suite. Raises UserError for a task that is none of the three, and for a
    subject with too few examples."""
    benchmarks = {}
    for name in suite.tasks:
        if name not in SPLITS or name not in suite.files:
            raise UserError(
                f"LLaMA-Factory's protocol is for {', '.join(SPLITS)} from files, not for '{name}'",
                where="--tasks",
                fix="give --tasks mmlu=FOLDER, or leave --protocol out",
            )
        benchmarks[name] = read_task(name, suite.files[name])
        shots = SHOTS if suite.shots is None else suite.shots
        for subject, files in benchmarks[name].items():
            if len(files.shots) < shots:
                raise UserError(
                    f"{subject} has {len(files.shots)} examples to show, and {shots} are asked for",
                    where=str(suite.files[name]),
                    fix="add them to dev/, or give --num-fewshot with fewer",
                )
    return benchmarks


def run_protocol(
    model: Model, suite: Suite, benchmarks: dict[str, dict[str, TaskFiles]], *, console: Console
) -> list[TaskResult]:
    """The results of a model, subject by subject. Raises UserError for a prompt longer than the context."""
    ids = [model.tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in LETTERS]
    prompts: list[str] = []
    texts: list[ScoredText] = []
    for benchmark, subjects in benchmarks.items():
        for name, files in subjects.items():
            for number, doc in enumerate(files.test[: suite.limit]):
                text = prompt_text(model, suite, benchmark, name, files, number, doc)
                prompt = model.tokenizer(text, add_special_tokens=False)["input_ids"]
                assert isinstance(prompt, list)
                if len(prompt) >= model.engine.context:
                    raise UserError(
                        f"the prompt has {len(prompt)} tokens, and the model's context is {model.engine.context}",
                        where=f"{name}, question {number}",
                        fix="give --num-fewshot with fewer examples",
                    )
                prompts.append(text)
                texts += [ScoredText((*prompt, letter), len(prompt)) for letter in ids]
    with shown(console, "answer letters") as progress:
        scores = model.score(texts, progress)
    values = np.asarray([score.log_probabilities[0] for score in scores]).reshape(-1, len(LETTERS))
    chosen = iter(zip(prompts, values.argmax(-1).tolist(), strict=True))
    results = []
    for benchmark, subjects in benchmarks.items():
        for name, files in subjects.items():
            samples = []
            for number, doc in enumerate(files.test[: suite.limit]):
                prompt, choice = next(chosen)
                correct = float(choice == doc["answer"])
                target = LETTERS[doc["answer"]]
                samples.append(Sample(str(number), prompt, target, LETTERS[choice], {"acc,letters": correct}))
            accuracy = float(np.mean([sample.metrics["acc,letters"] for sample in samples]))
            category = subject_of(benchmark, name.removeprefix(f"{benchmark}_")).category
            results.append(TaskResult(name, benchmark, category, {"acc,letters": accuracy}, samples, {"acc": True}))
    return results


def prompt_text(model: Model, suite: Suite, benchmark: str, name: str, files: TaskFiles, number: int, doc: Doc) -> str:
    """A question after its examples, as the model's chat template writes them."""
    shots = SHOTS if suite.shots is None else suite.shots
    order = np.random.default_rng([suite.seed, number]).permutation(len(files.shots))[:shots]
    messages: list[dict[str, object]] = []
    for index in order:
        shot = files.shots[index]
        messages.append({"role": "user", "content": _question(benchmark, shot)})
        messages.append({"role": "assistant", "content": LETTERS[shot["answer"]]})
    messages.append({"role": "user", "content": _question(benchmark, doc)})
    system = SYSTEM[benchmark].format(subject_of(benchmark, name.removeprefix(f"{benchmark}_")).name)
    messages[0]["content"] = system + str(messages[0]["content"])
    chat = chat_template(model.tokenizer)
    try:
        return chat.render(messages, generation_prompt=True)
    except chat.failures as problem:
        raise template_error(problem, where=f"{name}, question {number}") from problem


def _question(benchmark: str, doc: Doc) -> str:
    choices = "".join(f"\n{letter}. {text}" for letter, text in zip(LETTERS, doc["choices"], strict=True))
    return f"{doc['question']}{choices}{ANSWER[benchmark]}"
