"""The command `meshtune push`, and the code of the card that it writes, as other people run them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hub.fake_hub import TOKEN, Repository, running_hub


@pytest.mark.slow
def test_the_command_pushes_by_the_endpoint_of_the_environment(finished_run):
    with running_hub() as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "meshtune", "push", str(finished_run), "ann/lesson"]
        ran = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert f"{hub.url}/ann/lesson" in ran.stdout
        assert "adapter_model.safetensors" in hub.repositories["ann/lesson"].files


@pytest.mark.slow
def test_the_code_of_a_card_prints_an_answer(finished_run, tmp_path):
    from meshtune.quickstart import MODEL

    with running_hub() as hub:
        hub.repositories["org/stories"] = Repository(False, {p.name: p.read_bytes() for p in MODEL.iterdir()})
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        environment = os.environ | settings | {"HF_HOME": str(tmp_path)}
        for name, flags in (("lesson", []), ("merged", ["--merge"])):
            command = [sys.executable, "-m", "meshtune", "push", str(finished_run), f"ann/{name}", *flags]
            subprocess.run([*command, "--base-model", "org/stories"], env=environment, check=True)
            card = hub.repositories[f"ann/{name}"].files["README.md"].decode()
            code = card.split("```python\n")[1].split("```")[0].replace('"..."', '"Once upon a time"')
            ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
            assert "Once upon a time" in ran.stdout, ran.stderr
