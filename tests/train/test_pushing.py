"""A recipe that pushes: on the way and at the end; what the hub refuses later does not end the run."""

from __future__ import annotations

import json

import pytest

from hub.fake_hub import TOKEN, Repository, running_hub
from meshtune.errors import UserError
from meshtune.quickstart import recipe
from meshtune.train.run import train

SMALL = ("train.steps=4", "sample.prompts=[]", "data.max_length=128", "data.validation=null", "eval.every=null")
HUB = ("hub.repository=ann/lesson", "hub.base_model=org/stories", "checkpoint.every=1", "hub.every=2")


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for name, value in {"ENDPOINT": running.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(constants, name, value)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield running


@pytest.mark.slow
def test_a_run_pushes_at_a_save_and_at_its_end(hub, tmp_path):
    run = tmp_path / "run"
    result = train(recipe(str(run), *SMALL, *HUB))
    pushes = [json.loads(body.splitlines()[0]) for _, path, body in hub.sent if "/commit/" in path]
    assert [commit["value"]["summary"] for commit in pushes] == ["After update 2 of 4", "Push adapter with Meshtune"]
    pushed = hub.repositories["ann/lesson"].files
    assert result.path is not None
    final = (result.path / "adapter_model.safetensors").read_bytes()
    assert pushed["adapter_model.safetensors"][-4096:] == final[-4096:]
    assert not (run / ".hub").exists()
    assert "pushed the result after update 2" in (run / "console.log").read_text()
    assert "hub" not in pushed["README.md"].decode().split("```yaml")[1].split("```")[0]


def test_a_push_that_fails_does_not_end_the_run(hub, tmp_path, monkeypatch):
    hub.refuse_after = 0
    result = train(recipe(str(tmp_path / "run"), *SMALL, *HUB))
    assert result.path is not None
    said = (tmp_path / "run/console.log").read_text()
    assert "not pushed after update 2: the hub refused the push (HTTP 400" in said
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "finished"
    assert hub.repositories["ann/lesson"].commits == 1


def test_what_would_refuse_every_push_is_said_before_the_run(hub, tmp_path):
    hub.repositories["ann/lesson"] = Repository(files={"other.bin": b"x"})
    with pytest.raises(UserError, match=r"hub\.overwrite"):
        train(recipe(str(tmp_path / "run"), *SMALL, *HUB))
    assert not (tmp_path / "run").exists()
