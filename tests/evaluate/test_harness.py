"""lm-eval over the engine against lm-eval's own transformers backend, and benchmarks from published files."""

from __future__ import annotations

import os
import pathlib

import pytest
import yaml

pytest.importorskip("lm_eval", reason="the extra evaluate is not installed")

import published

import meshtune
from meshtune.errors import UserError
from meshtune.evaluate.harness import Suite, check_text_only, parse_tasks, prepare, run_tasks
from meshtune.evaluate.tasks import averages, read_task
from meshtune.terminal import console

QUIET = console(quiet=True)


@pytest.fixture(scope="module")
def model(stories260k):
    return meshtune.load(stories260k)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    files = {
        "arc_easy": published.arc(folder),
        "hellaswag": published.hellaswag(folder),
        "gsm8k": published.gsm8k(folder),
        "perplexity": published.perplexity(folder),
        "mmlu": published.mmlu(folder),
        "ceval": published.ceval(folder),
        "cmmlu": published.cmmlu(folder),
    }
    return Suite(tuple(files), files, shots=2, gen_kwargs={"max_gen_toks": 12})


@pytest.fixture(scope="module")
def tasks(suite, tmp_path_factory):
    return prepare(suite, tmp_path_factory.mktemp("tasks"))


def by_transformers(path: pathlib.Path, suite: Suite, tasks) -> dict:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    os.environ["TQDM_DISABLE"] = "1"
    tokenizer = AutoTokenizer.from_pretrained(path)
    lm = HFLM(AutoModelForCausalLM.from_pretrained(path, dtype="float32"), tokenizer=tokenizer, device="cpu")
    return lm_eval.simple_evaluate(
        model=lm,
        tasks=list(tasks.names),
        num_fewshot=suite.shots,
        task_manager=tasks.manager,
        limit=suite.limit,
        apply_chat_template=suite.chat,
        fewshot_as_multiturn=suite.chat,
        gen_kwargs=dict(suite.gen_kwargs),
        bootstrap_iters=0,
    )  # pyright: ignore


def check_same(results, reference, digits: float):
    """Every metric of every task, every answer that was generated, and the log-likelihood of every request."""
    assert {result.name for result in results} == set(reference["samples"])
    compared = 0
    for result in results:
        for name, value in result.metrics.items():
            assert value == pytest.approx(reference["results"][result.name][name], rel=digits), (result.name, name)
            compared += 1
        for sample, expected in zip(result.samples, reference["samples"][result.name], strict=True):
            assert sample.id == f"{expected['doc_id']}:{expected['filter']}"
            if isinstance(expected["filtered_resps"][0], str):
                assert sample.answer == expected["filtered_resps"]
    return compared


def test_three_types_of_tasks_have_the_numbers_of_lm_evals_transformers_backend(model, suite, tmp_path, stories260k):
    few = Suite(("arc_easy", "gsm8k", "perplexity"), suite.files, shots=0, limit=3, gen_kwargs={"max_gen_toks": 6})
    tasks = prepare(few, tmp_path)
    results, _ = run_tasks(model, few, tasks, console=QUIET)
    assert check_same(results, by_transformers(stories260k, few, tasks), 1e-5) == 7


@pytest.mark.slow
def test_every_type_of_task_has_the_numbers_of_lm_evals_transformers_backend(model, suite, tasks, stories260k):
    results, facts = run_tasks(model, suite, tasks, console=QUIET)
    compared = check_same(results, by_transformers(stories260k, suite, tasks), 1e-5)
    assert compared >= 12
    kinds = {name.split(",")[0] for result in results for name in result.metrics}
    assert {"acc", "acc_norm", "exact_match", "word_perplexity"} <= kinds
    table = averages(results)
    assert set(table) == {"mmlu", "ceval", "cmmlu"}
    subjects = {result.name: result for result in results}
    mean = (subjects["mmlu_astronomy"].metrics["acc,none"] + subjects["mmlu_philosophy"].metrics["acc,none"]) / 2
    assert table["mmlu"]["acc, Average"] == pytest.approx(mean)
    assert table["mmlu"]["acc, STEM"] == subjects["mmlu_astronomy"].metrics["acc,none"]
    assert facts["contexts_cut"] == 0


@pytest.mark.slow
@pytest.mark.timeout(2400)  # 5 minutes of one core by ours and theirs together
@pytest.mark.parametrize("chat", [False, True])
def test_smollm2_has_the_numbers_of_lm_evals_transformers_backend(smollm2, suite, tmp_path, shared, chat):
    """To the digit of rounding: multiple choice (acc and acc_norm), few-shot, rolling perplexity, generation."""
    data = shared / "assets/data/eval"
    files = suite.files | {"mmlu": data / "mmlu", "arc_easy": data / "llm-foundry/arc_easy.jsonl"}
    names = ("arc_easy", "hellaswag", "gsm8k", "perplexity")
    few = Suite(names, files, shots=0, limit=12, chat=chat, gen_kwargs={"max_gen_toks": 24})
    shown = Suite(("mmlu",), files, shots=5, limit=4, chat=chat, gen_kwargs={"max_gen_toks": 24})
    model = meshtune.load(smollm2)
    for number, part in enumerate((few, shown)):
        tasks = prepare(part, tmp_path / f"tasks{number}")
        results, _ = run_tasks(model, part, tasks, console=QUIET)
        check_same(results, by_transformers(smollm2, part, tasks), 1e-5)


def test_tasks_from_files_keep_lm_evals_prompts(tasks, suite, tmp_path):
    loaded = tasks.manager.load(list(tasks.names))["tasks"]
    assert loaded["mmlu_astronomy"].config.description.endswith("about astronomy.\n\n")
    assert "注册会计师" in loaded["ceval_accountant"].config.description
    assert loaded["cmmlu_agronomy"].doc_to_text(loaded["cmmlu_agronomy"].eval_docs[0]).endswith("答案：")
    assert loaded["hellaswag"].eval_docs[0]["query"].startswith("Playing: A girl sees a dog near the tree. She")


def test_published_forms_are_read_alike(tmp_path, shared):
    ours = read_task("mmlu", shared / "assets/data/eval/mmlu")
    assert set(ours) >= {"mmlu_astronomy", "mmlu_marketing"}
    doc = ours["mmlu_astronomy"].test[0]
    assert doc["choices"][0] == "This type occurs in binary systems."
    assert doc["answer"] == 0
    assert len(ours["mmlu_astronomy"].shots) == 5
    (arc,) = read_task("arc_easy", shared / "assets/data/eval/llm-foundry/arc_easy.jsonl").values()
    assert arc.test[0]["question"].startswith("Which statement best explains")
    assert arc.test[0]["answerKey"] == "A"
    (hub,) = read_task("arc_easy", published.arc(tmp_path)).values()
    assert set(hub.test[0]) == set(arc.test[0])


def test_a_missing_column_is_named(tmp_path):
    file = published.hellaswag(tmp_path) / "hellaswag_val.jsonl"
    file.write_text(file.read_text().replace('"endings"', '"ends"'))
    with pytest.raises(UserError, match=r"no field 'endings'; there are: ind[\s\S]*record 0"):
        read_task("hellaswag", file)
    folder = published.ceval(tmp_path)
    csv = folder / "val/accountant_val.csv"
    csv.write_text(csv.read_text().replace("answer", "solution", 1))
    with pytest.raises(UserError, match=r"no column 'answer'[\s\S]*accountant_val.csv"):
        read_task("ceval", folder)


def test_a_subject_without_examples_is_named(tmp_path):
    folder = published.cmmlu(tmp_path)
    (folder / "test/agronomy.csv").write_text(",Question,A,B,C,D,Answer\n")
    with pytest.raises(UserError, match="subject agronomy has no examples"):
        read_task("cmmlu", folder)
    (published.mmlu(tmp_path) / "dev/astronomy_dev.csv").unlink()
    files = {"mmlu": tmp_path / "mmlu"}
    with pytest.raises(UserError, match="mmlu_astronomy has 0 examples to show, and 5 are asked for"):
        prepare(Suite(("mmlu",), files), tmp_path / "tasks")
    assert prepare(Suite(("mmlu",), files, shots=0), tmp_path / "tasks").names == ["mmlu_astronomy", "mmlu_philosophy"]


def test_wrong_answers_paths_and_empty_files_are_refused(tmp_path):
    rows = [["q", "a", "b", "c", "d", letter] for letter in "AE"]
    published.write_csv(tmp_path / "m/test/law_test.csv", rows)
    with pytest.raises(UserError, match=r"the answer is 'E'[\s\S]*record 1"):
        read_task("mmlu", tmp_path / "m")
    with pytest.raises(UserError, match="needs a folder with test or val"):
        read_task("mmlu", tmp_path / "nowhere")
    with pytest.raises(UserError, match="no such file or folder"):
        read_task("hellaswag", tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match=r"empty\.jsonl"):
        read_task("gsm8k", tmp_path / "empty.jsonl")


def test_tasks_are_parsed_and_unknown_ones_have_near_names():
    assert parse_tasks(["arc_easy, mmlu=data/mmlu", "wikitext"]) == (
        ("arc_easy", "mmlu", "wikitext"),
        {"mmlu": pathlib.Path("data/mmlu")},
    )
    with pytest.raises(UserError, match="did you mean 'hellaswag'"):
        parse_tasks(["hellaswang=x"])
    with pytest.raises(UserError, match="given twice"):
        parse_tasks(["mmlu=a,mmlu=b"])


def test_a_task_of_lm_evals_own_without_its_data_or_unknown_is_refused(tmp_path, monkeypatch):
    import lm_eval.tasks

    class FewTasks(lm_eval.tasks.TaskManager):  # the real one reads ten thousand files
        def __init__(self, include_path=None, include_defaults=True):
            super().__init__(
                include_path=[str(pathlib.Path(lm_eval.tasks.__file__).parent / "arc")], include_defaults=False
            )

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", FewTasks)
    with pytest.raises(UserError, match="did you mean 'arc_easy'"):
        prepare(Suite(("arc_eazy",)), tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"data of task 'arc_easy' are neither on this machine[\s\S]*arc_easy=PATH"):
        prepare(Suite(("arc_easy",)), tmp_path)


def test_more_tokens_than_the_context_are_refused(model, suite, tasks):
    small = Suite(("gsm8k",), suite.files, shots=0, limit=1, gen_kwargs={"max_gen_toks": 600})
    with pytest.raises(UserError, match="asks for 600 new tokens, and the model's context is 512"):
        run_tasks(model, small, type(tasks)(["gsm8k"], tasks.manager, tasks.subjects), console=QUIET)


def test_task_files_can_be_run_by_lm_eval_itself(tasks, tmp_path):
    (folder,) = {pathlib.Path(path) for path in [tasks.manager.include_path]}
    config = yaml.safe_load((folder / "arc_easy.yaml").read_text())
    assert pathlib.Path(config["dataset_kwargs"]["data_files"]["test"]).is_file()
    assert config["include"].endswith("arc/arc_easy.yaml")


def test_a_task_with_pictures_is_refused_by_name(tmp_path):
    """A task of lm-eval's own class; in a group too."""
    from lm_eval.api.task import ConfigurableTask

    (tmp_path / "a.jsonl").write_text('{"question": "What is it?", "answer": "A cat", "picture": "a.png"}\n')
    form = {"task": "see", "dataset_path": "json", "dataset_kwargs": {"data_files": str(tmp_path / "a.jsonl")}}
    form |= {
        "test_split": "train",
        "output_type": "generate_until",
        "doc_to_text": "question",
        "doc_to_target": "answer",
    }
    check_text_only("see", {"see": ConfigurableTask(config=dict(form))})
    task = ConfigurableTask(config={**form, "doc_to_image": ["picture"]})
    for loaded in ({"see": task}, {"group": {"see": task}}):
        with pytest.raises(UserError, match="'see' asks about pictures"):
            check_text_only("see", loaded)
