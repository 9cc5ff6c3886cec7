"""lm-eval in process, with its own tasks: from files, where a task has a path, else from its hub or cache."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from meshtune.data.readers.hub import is_reachable
from meshtune.errors import UserError, nearest
from meshtune.evaluate.folder import replace, write_lines
from meshtune.evaluate.metrics import optional
from meshtune.evaluate.tasks import FROM_FILES, SPLITS, Sample, TaskFiles, TaskResult, category_of, read_task
from meshtune.generate.api import Model

# Where lm-eval has the task that a file replaces the data of; of subjects, the template behind them.
CONFIGS = {
    "mmlu": "mmlu/default/mmlu_{}.yaml",
    "ceval": "ceval/ceval-valid_{}.yaml",
    "cmmlu": "cmmlu/cmmlu_{}.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "ifeval": "ifeval/ifeval.yaml",
}
TEMPLATES = {
    "mmlu": "mmlu/default/_default_template_yaml",
    "ceval": "ceval/_default_ceval_yaml",
    "cmmlu": "cmmlu/_default_template_yaml",
}
PERPLEXITY = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    "metadata": {"version": 1.0},
}
SHOTS = {"mmlu": 5, "ceval": 5, "cmmlu": 5}  # where the protocol of a benchmark has them and lm-eval's config none


@dataclasses.dataclass(frozen=True)
class Suite:
    """Which tasks are run and how. `files` are the paths of the tasks that come from files; `shots` is the number of
    examples shown (None: the task's own), `chat` renders prompts by the chat template, examples as turns."""

    tasks: tuple[str, ...]
    files: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)
    shots: int | None = None
    chat: bool = False
    system_instruction: str | None = None
    limit: int | None = None
    gen_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 1234
    rows: int = 16


def parse_tasks(text: Sequence[str]) -> tuple[tuple[str, ...], dict[str, pathlib.Path]]:
    """Tasks from NAME or NAME=PATH, separated by commas. Raises UserError for a path of a task that takes none."""
    names, files = [], {}
    for part in (part.strip() for item in text for part in item.split(",")):
        name, equals, path = part.partition("=")
        if not part:
            continue
        if equals and name not in FROM_FILES:
            raise UserError(
                f"there is no task '{name}' that reads files",
                where="--tasks",
                fix=f"{nearest(name, FROM_FILES)}these do: {', '.join(FROM_FILES)}",
            )
        if name in names:
            raise UserError(f"the task '{name}' is given twice", where="--tasks", fix="give it once")
        names.append(name)
        if equals:
            files[name] = pathlib.Path(path).expanduser()
    return tuple(names), files


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Tasks that are ready to run: names for lm-eval, its manager, and the benchmark and subject of those that came
    from files by name."""

    names: list[str]
    manager: Any
    subjects: dict[str, tuple[str, str]]

    def of(self, benchmark: str) -> Tasks:
        """The tasks of one benchmark."""
        names = [name for name in self.names if self.subjects.get(name, (name, ""))[0] == benchmark]
        return dataclasses.replace(self, names=names)


def prepare(suite: Suite, folder: pathlib.Path) -> Tasks:
    """Reads and checks the files of a suite and writes them, and the tasks over them, into `folder`.

    Raises UserError for an unknown task, and as read_task does.
    """
    optional("lm_eval", "lm-eval's tasks")
    if len(suite.files) == len(suite.tasks):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    else:
        _keep_offline_without_hub()
    import lm_eval.tasks

    installed = pathlib.Path(str(lm_eval.tasks.__file__)).parent
    folder.mkdir(parents=True, exist_ok=True)
    names, subjects = [], {}
    for benchmark in suite.tasks:
        if benchmark not in suite.files:
            names.append(benchmark)
            continue
        if benchmark == "ifeval":
            _check_ifeval()
        for name, files in read_task(benchmark, suite.files[benchmark]).items():
            subject = name.removeprefix(f"{benchmark}_") if benchmark in SPLITS else ""
            _write_task(folder, installed, benchmark, subject, name, files, suite)
            subjects[name] = (benchmark, subject)
            names.append(name)
    tasks_of_lm_eval = [name for name in suite.tasks if name not in suite.files]
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=bool(tasks_of_lm_eval))
    for name in tasks_of_lm_eval:
        if name not in manager.all_tasks:
            fix = f"{nearest(name, manager.all_tasks)}`lm-eval ls tasks` lists them; files: NAME=PATH"
            raise UserError(f"there is no task '{name}'", where="--tasks", fix=fix)
        _check_data(name, manager)
    return Tasks(names, manager, subjects)


def _keep_offline_without_hub() -> None:
    """Keeps this process to cached files if no hub can be reached: each file would be tried many times."""
    import huggingface_hub
    from datasets import config

    if is_reachable(huggingface_hub.constants.ENDPOINT):
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # both were read as they were imported
    config.HF_HUB_OFFLINE = True


def _check_data(name: str, manager: Any) -> None:
    """Loads the data of one of lm-eval's own tasks, or group of them. Raises UserError where they cannot be had, and
    for tasks with pictures or sound."""
    tasks = optional("lm_eval.tasks", "lm-eval's tasks")
    try:
        loaded = tasks.get_task_dict([name], manager)
    except (OSError, ValueError) as problem:  # what datasets raises without a network, and without a cache
        raise UserError(
            f"the data of task '{name}' are neither on this machine nor to be had from the hub: {problem}",
            where="--tasks",
            fix=f"run it once where there is a network, or give files: --tasks {name}=PATH"
            if name in FROM_FILES
            else "run it once where there is a network, whose cache (HF_HOME) can be copied",
        ) from problem

    check_text_only(name, loaded)


def check_text_only(name: str, loaded: Mapping[Any, Any]) -> None:
    """Raises UserError where a task of lm-eval, or one of a group, asks about pictures or sound."""
    for task in loaded.values():
        if isinstance(task, Mapping):
            check_text_only(name, task)
        elif getattr(task, "MULTIMODAL", False):
            raise UserError(
                f"task '{name}' asks about pictures or sound, and lm-eval's tasks are asked in text here",
                where="--tasks",
                fix="write its questions with their pictures into a file of records, and give it as --data FILE",
            )


def _check_ifeval() -> None:
    for package in ("langdetect", "immutabledict"):
        optional(package, "IFEval")
    nltk = optional("nltk", "IFEval")
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError as problem:
        raise UserError(
            "IFEval counts sentences with nltk's data punkt_tab, which are not here",
            where="--tasks ifeval",
            fix="where there is a network: python -m nltk.downloader -d FOLDER punkt_tab; then set NLTK_DATA=FOLDER",
        ) from problem


def _write_task(
    folder: pathlib.Path,
    installed: pathlib.Path,
    benchmark: str,
    subject: str,
    name: str,
    files: TaskFiles,
    suite: Suite,
) -> None:
    """Writes a task's examples as JSON lines, and its YAML: lm-eval's own with these data."""
    config: dict[str, Any] = {"task": name, "dataset_path": "json", "dataset_name": None}
    if benchmark == "perplexity":
        config |= PERPLEXITY
    else:
        file = installed / CONFIGS[benchmark].format(subject)
        if not file.is_file():
            file = installed / TEMPLATES[benchmark]
            config["description"] = DESCRIPTIONS[benchmark].format(subject.replace("_", " "))
        config["include"] = str(file)
    shots = suite.shots if suite.shots is not None else SHOTS.get(benchmark)
    if benchmark == "perplexity":
        shots = 0  # of whole texts nothing can be shown before
    if shots is not None:
        config["num_fewshot"] = shots
    needed = shots if shots is not None else (5 if benchmark == "gsm8k" else 0)
    if needed > len(files.shots):
        raise UserError(
            f"{name} has {len(files.shots)} examples to show, and {needed} are asked for",
            where=str(suite.files[benchmark]),
            fix="add them (dev/ or train), or give --num-fewshot with fewer",
        )
    test = folder / f"{name}.jsonl"
    write_lines(test, (_example_fields(benchmark, doc) for doc in files.test))
    splits = {"test": str(test.absolute())}
    if files.shots:
        shown = folder / f"{name}.shots.jsonl"
        write_lines(shown, (_example_fields(benchmark, doc) for doc in files.shots))
        splits["dev"] = str(shown.absolute())
    config |= {
        "dataset_kwargs": {"data_files": splits},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": "dev" if files.shots else None,
    }
    replace(folder / f"{name}.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


DESCRIPTIONS = {
    "mmlu": "The following are multiple choice questions (with answers) about {}.\n\n",
    "ceval": "以下是中国关于{}的单项选择题，请选出其中的正确答案。\n\n",
    "cmmlu": "以下是关于{}的单项选择题，请直接给出正确答案的选项。\n\n",
}


def _example_fields(benchmark: str, doc: Mapping[str, Any]) -> dict[str, Any]:
    """An example with the fields that lm-eval's own task reads."""
    if benchmark in ("ceval", "cmmlu"):
        letters = dict(zip("ABCD", doc["choices"], strict=True))
        question, answer = ("question", "answer") if benchmark == "ceval" else ("Question", "Answer")
        return {question: doc["question"], **letters, answer: "ABCD"[doc["answer"]]}
    return dict(doc)


def run_tasks(model: Model, suite: Suite, tasks: Tasks, *, console: Console) -> tuple[list[TaskResult], dict[str, Any]]:
    """The results of a model, task by task with every sample, and what lm-eval says of the run."""
    from meshtune.evaluate.language_model import EngineLM

    evaluator = optional("lm_eval.evaluator", "lm-eval's tasks")

    lm = EngineLM(model, console=console, rows=suite.rows)
    with _quiet(evaluator):
        outcome: dict[str, Any] = evaluator.simple_evaluate(
            model=lm,
            tasks=list(tasks.names),
            num_fewshot=suite.shots,
            task_manager=tasks.manager,
            limit=suite.limit,
            apply_chat_template=suite.chat,
            fewshot_as_multiturn=suite.chat,
            system_instruction=suite.system_instruction,
            gen_kwargs=dict(suite.gen_kwargs) or None,
            log_samples=True,
            bootstrap_iters=1000,
            random_seed=suite.seed,
            numpy_random_seed=suite.seed,
            torch_random_seed=suite.seed,
            fewshot_random_seed=suite.seed,
        )
    results = []
    for name, samples in outcome["samples"].items():
        values = {key: value for key, value in outcome["results"][name].items() if key not in ("alias", "name")}
        benchmark, subject = tasks.subjects.get(name, (name, ""))
        category = category_of(benchmark, subject) if benchmark in SPLITS else ""
        results.append(
            TaskResult(
                name=name,
                benchmark=benchmark,
                category=category,
                metrics={
                    k: float(v)
                    for k, v in values.items()
                    if isinstance(v, int | float) and "_stderr" not in k and "," in k
                },
                samples=[_sample(sample) for sample in samples],
                higher_is_better={k: v for k, v in outcome["higher_is_better"].get(name, {}).items() if v is not None},
            )
        )
    facts = {key: outcome.get(key) for key in ("versions", "n-shot", "n-samples", "results")}
    return results, json.loads(json.dumps(facts | {"contexts_cut": lm.cut}, default=str))


def _sample(sample: Mapping[str, Any]) -> Sample:
    """A sample as lm-eval logs it: one for each example and filter."""
    metrics = {
        f"{name},{sample['filter']}": tuple(map(float, value)) if isinstance(value, tuple | list) else float(value)
        for name in sample["metrics"]
        if isinstance(value := sample.get(name), int | float | np.number | tuple)
    }
    arguments = sample["arguments"]
    first = next(iter(arguments.values())) if isinstance(arguments, Mapping) else arguments[0]
    prompt = first.get("arg_0", "") if isinstance(first, Mapping) else first[0]
    return Sample(
        id=f"{sample['doc_id']}:{sample['filter']}",
        prompt=str(prompt),
        target=str(sample["target"]),
        answer=json.loads(json.dumps(sample["filtered_resps"], default=str)),
        metrics=metrics,
    )


@contextlib.contextmanager
def _quiet(evaluator: Any) -> Iterator[None]:
    """Keeps the notes and bars of lm-eval and datasets from the screen, which shows this evaluation's.

    lm-eval asks git for the commit of the current directory, and git complains where that is no repository.
    """
    import datasets

    commit_hash = evaluator.get_git_commit_hash
    evaluator.get_git_commit_hash = lambda: None
    logger, level = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = commit_hash
        datasets.enable_progress_bars()
        logger.setLevel(level)
