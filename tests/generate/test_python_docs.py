"""docs/python.md: its snippets run unchanged, with a tiny model in place of the one they name."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import meshtune.data.tokenizer as tokenizers

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/python.md"
NAMED = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_snippets_run(stories260k, tmp_path, monkeypatch):
    shutil.copytree(stories260k, tmp_path / "model")
    for path in [tmp_path / "model", *(tmp_path / "model").iterdir()]:
        path.chmod(0o755)
    (tmp_path / "model/chat_template.jinja").write_text(tokenizers.template_text("plain"))
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A little dog named Tim."}]
    (tmp_path / "conversations.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(8)))
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) >= 8
    assert any(NAMED in snippet for snippet in snippets)
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet.replace(NAMED, "model"), str(PAGE), "exec"), names)
    assert (tmp_path / "runs/mine/adapter/adapter_config.json").is_file()
    assert "model" in str(names["tuned"])
