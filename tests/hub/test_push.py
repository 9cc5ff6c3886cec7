"""Pushing to a hub over HTTP: one commit, private, resumed after a break, without tokens or paths of this machine."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import re
import shutil

import pytest
import yaml

from hub.fake_hub import READER, TOKEN, Repository
from meshtune.errors import UserError
from meshtune.hub.push import push
from meshtune.runs.output import read_run, write_run


def bodies(hub) -> bytes:
    """Everything that was sent, with the contents of a commit decoded."""
    sent = []
    for _, _, body in hub.sent:
        sent.append(body)
        for content in re.findall(rb'"(?:content|sample)": ?"([A-Za-z0-9+/=]+)"', body):
            sent.append(base64.b64decode(content))
    return b"\n".join(sent)


def commits(hub) -> int:
    return sum("/commit/" in path for path in hub.paths("POST"))


def test_a_run_is_pushed_private_as_one_commit_and_loads_again(hub, finished_run):
    pushed = push(finished_run, "ann/lesson", base_model="org/stories")
    repository = hub.repositories["ann/lesson"]
    assert repository.private
    assert commits(hub) == 1
    assert pushed.commit == repository.sha
    assert set(pushed.files) == set(repository.files) - {".gitattributes"}
    assert json.loads(repository.files["adapter_config.json"])["base_model_name_or_path"] == "org/stories"

    from huggingface_hub import snapshot_download
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from meshtune.quickstart import MODEL
    from meshtune.runs.sources import find

    adapted = find(MODEL, "ann/lesson")  # downloads it, and compares every file with its digest
    assert adapted.adapter is not None
    assert adapted.adapter != finished_run / "adapter"
    folder = snapshot_download("ann/lesson")
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    again = PeftModel.from_pretrained(model, folder)
    assert any(parameter.abs().sum() > 0 for name, parameter in again.named_parameters() if "lora_B" in name)


def test_nothing_that_is_sent_names_this_machine_or_the_token(hub, finished_run, tmp_path):
    copy = tmp_path / "run of mine"
    shutil.copytree(finished_run, copy)
    push(copy, "ann/lesson")
    sent = bodies(hub)
    assert b"adapter_model" in sent
    assert b"learning_rate" in sent
    assert b"down_proj.lora_A" in sent
    import meshtune

    package = pathlib.Path(meshtune.__file__).parent
    for secret in (
        TOKEN,
        str(copy),
        str(finished_run),
        str(package),
        str(pathlib.Path.home()),
        str(tmp_path),
        os.getcwd(),
    ):
        assert secret.encode() not in sent
    assert not re.search(rb"hf_[A-Za-z0-9]{30,}", sent)


def test_a_file_with_a_token_or_a_local_path_is_not_pushed(hub, finished_run, tmp_path):
    adapter = tmp_path / "adapter"
    shutil.copytree(finished_run / "adapter", adapter)
    (adapter / "digests.json").unlink()
    (adapter / "notes.txt").write_text(f"made with {READER}")
    with pytest.raises(UserError, match=r"'notes.txt' holds a token"):
        push(adapter, "ann/lesson")
    (adapter / "notes.txt").write_text(f"see {adapter}/config")
    with pytest.raises(UserError, match=r"'notes.txt' names a path of this machine"):
        push(adapter, "ann/lesson")
    assert commits(hub) == 0


def test_the_card_says_how_the_model_came_to_be(hub, finished_run):
    push(finished_run, "ann/lesson", base_model="org/stories")
    card = hub.repositories["ann/lesson"].files["README.md"].decode()
    fields = yaml.safe_load(card.split("---")[1])
    assert fields["base_model"] == "org/stories"
    assert fields["base_model_relation"] == "adapter"
    assert (fields["library_name"], fields["license"]) == ("peft", "mit")
    facts = read_run(finished_run)
    assert facts["base"]["hash"] in card
    assert facts["data"] in card
    assert f"{facts['trained_on']['tokens']:,} tokens" in card
    rows = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert f"{row['loss']:.4f}" in card
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert recipe["model"] == {"path": "org/stories"}
    assert recipe["data"]["train"][0]["path"] == "lesson.jsonl"
    assert recipe["train"]["steps"] == 3
    assert "seed" not in recipe, "defaults are left out"


def test_the_card_has_answers_of_base_and_result_to_the_recipes_prompts(hub, finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    answers = [(0, "Hello", "a ``` fence"), (2, "Hello", "half"), (3, "Hello", "done\n"), (3, "Later", "no base")]
    rows = [{"step": step, "prompt": prompt, "text": text} for step, prompt, text in answers]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    push(run, "ann/lesson", base_model="org/stories")
    section = hub.repositories["ann/lesson"].files["README.md"].decode().split("## Before and after")[1]
    assert "````text\n  a ``` fence\n  ````" in section
    assert "after update 3:\n\n  ```text\n  done\n  ```" in section
    assert "half" not in section
    assert "Later" not in section


def test_a_push_of_a_run_that_reads_pictures_shows_none(hub, finished_run, tmp_path):
    """Neither those of prompts nor what an answer writes: two questions of the same words stay two."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    answers = ["![a](http://x.org/a.png)", "<img src='http://x.org/b.png'>"]
    rows = [
        {
            "step": step,
            "prompt": "<image>What?",
            "text": f"{answer} {step}",
            "pictures": [f"data:image/jpeg;base64,{n}"],
        }
        for n, answer in enumerate(answers)
        for step in (0, 3)
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    push(run, "ann/lesson", base_model="org/stories")
    files = hub.repositories["ann/lesson"].files
    shown = [name for name in files if name.endswith((".png", ".jpg", ".jpeg", ".webp", ".html", "samples.jsonl"))]
    assert shown == ["loss.png"]
    section = files["README.md"].decode().split("## Before and after")[1]
    assert [section.count(answer) for answer in answers] == [2, 2]
    outside = re.sub(r"```text\n.*?```", "", section, flags=re.DOTALL)
    assert "http" not in outside
    assert "data:" not in section


def test_the_recipe_of_a_card_is_the_run_again(hub, finished_run):
    from meshtune.config.load import load_recipe

    push(finished_run, "ann/lesson")
    card = hub.repositories["ann/lesson"].files["README.md"].decode()
    recipe = load_recipe(yaml.safe_load(card.split("```yaml")[1].split("```")[0]))
    before, after = (item.model_dump(mode="json") for item in (load_recipe(finished_run / "recipe.yaml"), recipe))
    for fields in (before, after):
        fields["model"]["path"] = fields["output"] = fields["data"]["train"][0]["path"] = "elsewhere"
    assert after == before


def test_the_licence_of_a_base_on_the_hub_is_asked_there(hub, finished_run, tmp_path):
    hub.repositories["org/stories"] = Repository(
        private=False, files={"README.md": b"---\nlicense: other\nlicense_name: stories\n---\n"}
    )
    base = tmp_path / "base"
    from meshtune.quickstart import MODEL

    shutil.copytree(MODEL, base)
    (base / "LICENSE").unlink()
    push(finished_run / "adapter", "ann/lesson", base=str(base), base_model="org/stories")
    fields = yaml.safe_load(hub.repositories["ann/lesson"].files["README.md"].decode().split("---")[1])
    assert (fields["license"], fields["license_name"]) == ("other", "stories")


def test_a_push_that_broke_sends_only_what_is_missing(hub, finished_run):
    hub.refuse_after = 1
    with pytest.raises(UserError, match="push again") as error:
        push(finished_run, "ann/lesson")
    assert "HTTP 400" in error.value.what
    assert commits(hub) == 0
    (arrived,) = hub.objects
    hub.refuse_after = None
    hub.sent.clear()
    push(finished_run, "ann/lesson")
    assert [path for path in hub.paths("PUT") if arrived in path] == []
    assert len(hub.paths("PUT")) == 1
    assert commits(hub) == 1


def test_a_run_pushed_twice_changes_nothing(hub, finished_run):
    first = push(finished_run, "ann/lesson")
    hub.sent.clear()
    second = push(finished_run, "ann/lesson")
    assert first.changed
    assert not second.changed
    assert second.commit == first.commit
    assert hub.paths("PUT") == []
    assert commits(hub) == 0


def test_a_merged_model_replaces_the_adapter_that_was_pushed_before(hub, finished_run):
    push(finished_run, "ann/lesson")
    pushed = push(finished_run, "ann/lesson", merge=True)
    files = hub.repositories["ann/lesson"].files
    assert pushed.kind == "merged"
    assert "model.safetensors" in files
    assert "adapter_model.safetensors" not in files
    assert "adapter_config.json" not in files
    assert b"MIT" in files["LICENSE"]
    fields = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert fields["library_name"] == "transformers"
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained("ann/lesson").config.model_type == "llama"
    assert str(finished_run).encode() not in bodies(hub)
    assert [path.name for path in finished_run.parent.iterdir() if path.name.startswith(".push")] == []


def test_a_gguf_file_is_pushed_with_the_card_of_its_run(hub, finished_run, tmp_path):
    file = tmp_path / "lesson-Q8_0.gguf"
    file.write_bytes(b"GGUF" + bytes(60))
    push(file, "ann/lesson-gguf", run=str(finished_run), base_model="org/stories", public=True)
    repository = hub.repositories["ann/lesson-gguf"]
    assert not repository.private
    assert repository.files[file.name] == file.read_bytes()
    fields = yaml.safe_load(repository.files["README.md"].decode().split("---")[1])
    assert (fields["base_model_relation"], fields["library_name"]) == ("finetune", "gguf")


def test_a_run_is_pushed_as_gguf_with_its_modelfile(hub, finished_run):
    push(finished_run, "ann/lesson-gguf", merge=True, gguf="Q8_0")
    files = hub.repositories["ann/lesson-gguf"].files
    assert files["lesson-Q8_0.gguf"].startswith(b"GGUF")
    assert b"FROM ./lesson-Q8_0.gguf" in files["lesson-Q8_0.Modelfile"]
    assert yaml.safe_load(files["README.md"].decode().split("---")[1])["library_name"] == "gguf"


@pytest.mark.parametrize(
    ("name", "token", "message", "fix"),
    [
        ("ann/lesson", "hf_" + "x" * 34, "does not accept this token (HTTP 401", "HF_TOKEN"),
        ("bob/lesson", TOKEN, "may not write to 'bob/lesson' (HTTP 403", "your own name"),
        ("bob/theirs", TOKEN, "may not write to 'bob/theirs' (HTTP 403", "your own name"),
        ("lesson", TOKEN, "is not the name of a repository", "user/name"),
        ("modelscope:ann/lesson", TOKEN, "not to ModelScope", "modelscope upload"),
        ("ann/open", TOKEN, "is a public repository", "--public"),
        ("ann/other", TOKEN, "files that no push of Meshtune wrote: model.bin", "--overwrite"),
    ],
)
def test_a_refusal_is_one_message_and_nothing_is_packed(hub, finished_run, monkeypatch, name, token, message, fix):
    hub.repositories["bob/theirs"] = Repository()
    hub.repositories["ann/open"] = Repository(private=False)
    hub.repositories["ann/other"] = Repository(files={"model.bin": b"x"})
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("meshtune.hub.push.export", lambda *_, **__: pytest.fail("it was packed"))
    with pytest.raises(UserError) as error:
        push(finished_run, name, merge=True)
    assert message in error.value.what
    assert fix in (error.value.fix or "")
    assert hub.paths("PUT") == []
    assert commits(hub) == 0


def test_a_push_does_not_make_a_private_repository_public(hub, finished_run):
    hub.repositories["ann/lesson"] = Repository(private=True)
    with pytest.raises(UserError, match="private repository, and a push does not make it public"):
        push(finished_run, "ann/lesson", public=True)
    assert commits(hub) == 0


def test_other_files_stay_where_the_repository_may_be_written_over(hub, finished_run):
    hub.repositories["ann/other"] = Repository(files={"model.bin": b"x", "README.md": b"mine"})
    push(finished_run, "ann/other", overwrite=True)
    files = hub.repositories["ann/other"].files
    assert files["model.bin"] == b"x"
    assert files["README.md"] != b"mine"
    push(finished_run, "ann/other", overwrite=True)
    with pytest.raises(UserError, match=r"model\.bin"):
        push(finished_run, "ann/other")


def test_without_a_token_or_with_a_run_under_way_nothing_is_asked_of_the_hub(hub, finished_run, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    write_run(run, {"status": "interrupted"})
    with pytest.raises(UserError, match="not finished: its status is 'interrupted'"):
        push(run, "ann/lesson")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="there is no token"):
        push(finished_run, "ann/lesson")
    assert hub.sent == []


def test_the_progress_of_an_export_is_reported_and_each_large_file_is_sent_once(hub, finished_run):
    reports: list[tuple[str, int, int]] = []
    push(finished_run, "ann/whole", merge=True, base_model="org/s", progress=lambda *report: reports.append(report))
    assert list(dict.fromkeys(stage for stage, _, _ in reports)) == ["reading", "writing", "checking"]
    files = hub.repositories["ann/whole"].files
    large = [name for name in files if name.endswith(".safetensors")]
    assert len(hub.paths("PUT")) == len(large) + sum(name.endswith(".png") for name in files)
    assert commits(hub) == 1
