"""`meshtune data inspect` with several sources."""

import json
import pathlib
import re

import pytest
import transformers
from rich.console import Console

import meshtune.quickstart
from meshtune.board.data_preview import preview
from meshtune.config.load import load_recipe
from meshtune.data.inspection import inspect_data
from meshtune.mesh.processes import Job
from meshtune.mesh.rendezvous import ProcessInfo
from meshtune.plan.report import updates_of
from meshtune.train.report.progress import log_console
from meshtune.train.run_setup import set_up_run

MODEL = pathlib.Path(meshtune.quickstart.__file__).parent / "model"


@pytest.mark.parametrize(
    ("records", "shown"),
    [
        (2, ["a.jsonl, record 0", "a.jsonl, record 1", "b.jsonl, record 0", "c.jsonl, record 0"]),
        (0, []),
    ],
)
def test_the_first_document_of_every_source_is_shown(tmp_path, monkeypatch, capsys, records, shown):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    for name in "abc":
        lines = [json.dumps({"prompt": f"{name}{number}", "completion": "so"}) for number in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    train = "[" + ", ".join(f"{tmp_path}/{name}.jsonl" for name in "abc") + "]"
    recipe = load_recipe(None, [f"model={MODEL}", f"data.train={train}", f"output={tmp_path}/out"])
    inspect_data(recipe, records=records, console=Console(width=200))
    assert re.findall(r"\w\.jsonl, record \d+", capsys.readouterr().out) == shown


def test_inspect_board_plan_and_train_have_one_tokenizer(stories260k, tmp_path, monkeypatch, capsys):
    """The recipe's new tokens are in all of them, as transformers adds them."""
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    turns = [("Say hi.", "Hi, little bear."), ("Say bye.", "Bye, little bear.")]
    records = [
        {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]}
        for user, answer in turns
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    marks = ["<|im_start|>", "<|im_end|>"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(stories260k)
    tokenizer.add_tokens(marks, special_tokens=True)
    text = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    expected = [len(tokenizer(text.format(*turn), add_special_tokens=False)["input_ids"]) for turn in turns]
    model = {"path": str(stories260k), "chat_template": "chatml", "new_special_tokens": marks}
    data = {"train": str(tmp_path / "data.jsonl"), "max_length": 96, "packing": False}
    output = tmp_path / "out"
    fields = {"model": model, "data": data, "output": str(output), "train": {"batch_size": 1, "epochs": 1}}
    recipe = load_recipe(fields)

    console = Console(width=200)
    inspect_data(recipe, console=console)
    shown = capsys.readouterr().out
    assert [int(count) for count in re.findall(r"record \d: (\d+) tokens", shown)] == expected
    assert "not a token of this tokenizer" not in shown
    assert [document["tokens"] for document in preview({"recipe": json.dumps(fields)})["documents"]] == expected
    assert updates_of(recipe).count == 2
    with log_console(console) as log:
        setup = set_up_run(recipe, output, console, log, Job(ProcessInfo()))
    assert [len(setup.data.train.store[index].ids) for index in range(2)] == expected
    assert setup.tokenizer.get_vocab() == tokenizer.get_vocab()
