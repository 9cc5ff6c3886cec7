"""A recipe that pushes: on the way and at the end; what the hub refuses later does not end the run."""

from __future__ import annotations

import json
import pathlib
import urllib.parse

import pytest
from real_runs import rows, start_launch, wait_until, write_stories

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
    log = (tmp_path / "run/console.log").read_text()
    assert "not pushed after update 2: the hub refused the push (HTTP 400" in log
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "finished"
    assert hub.repositories["ann/lesson"].commits == 1


def test_what_would_refuse_every_push_is_said_before_the_run(hub, tmp_path):
    hub.repositories["ann/lesson"] = Repository(files={"other.bin": b"x"})
    with pytest.raises(UserError, match=r"hub\.overwrite"):
        train(recipe(str(tmp_path / "run"), *SMALL, *HUB))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_several_processes_pushes_once_a_save_while_all_go_on(tmp_path):
    """Pushes at the saves after updates 2, 4, 6, 8 and at the end; the first one is held until update 5."""
    write_stories(tmp_path / "stories.jsonl")
    run = tmp_path / "run"
    fields = {
        "model": str(pathlib.Path(__file__).parents[2] / "src/meshtune/quickstart/model"),
        "data": {"train": str(tmp_path / "stories.jsonl"), "max_length": 64},
        "method": {"kind": "lora", "rank": 8},
        "train": {"steps": 9, "batch_size": 4},
        "checkpoint": {"every": 1},
        "hub": {"repository": "ann/lesson", "base_model": "org/stories", "every": 2},
        "output": str(run),
    }
    path = tmp_path / "recipe.yaml"  # JSON is YAML
    path.write_text(json.dumps(fields))

    def step():
        return max((row["step"] for row in rows(run)), default=0)

    with running_hub() as hub:
        hub.open.clear()
        port = urllib.parse.urlparse(hub.url).port
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        with start_launch(path, 2, 1, **settings) as job:
            wait_until(lambda: step() >= 5, lambda: job.launcher.poll() is None)
            talking = {
                number: [c for c in process.net_connections() if c.raddr and c.raddr.port == port]
                for number, process in job.members().items()
            }
            hub.open.set()
            code, log = job.ends(300)
        assert code == 0, log[-6000:]
    assert talking.keys() == {0, 1}
    assert talking[0]
    assert not talking[1]
    pushes = [json.loads(body.splitlines()[0])["value"]["summary"] for _, sent, body in hub.sent if "/commit/" in sent]
    assert pushes[0] == "After update 2 of 9"
    assert pushes[-1] == "Push adapter with Meshtune"
    left_out = [n for n in (2, 4, 6, 8) if f"not pushed after update {n}: the push before it is still being" in log]
    assert 4 in left_out
    assert sorted([*pushes[:-1], *(f"After update {n} of 9" for n in left_out)]) == [
        f"After update {n} of 9" for n in (2, 4, 6, 8)
    ]
    pushed = hub.repositories["ann/lesson"].files["adapter_model.safetensors"]
    assert pushed[-4096:] == (run / "adapter/adapter_model.safetensors").read_bytes()[-4096:]
    assert not (run / ".hub").exists()
