"""SmolLM2 is tuned on glaive's calls until it calls tools through the server that it has never seen."""

from __future__ import annotations

import json

import openai
import pytest
from serving import serving

import meshtune
from meshtune.serve.models import Models, load_served

UPDATES, UNSEEN = 60, 6


def first_calls(shared) -> list[dict]:
    """Conversations up to their first call, each of another question, the shortest first."""
    file_records = json.loads((shared / "assets/data/llamafactory/glaive_toolcall_en_demo.json").read_text())
    records = {}
    for record in file_records:
        turns = record["conversations"]
        if len(turns) > 1 and turns[1]["from"] == "function_call":
            records.setdefault(turns[0]["value"], {"conversations": turns[:2], "tools": record["tools"]})
    return sorted(records.values(), key=lambda record: len(json.dumps(record)))


@pytest.mark.slow
def test_a_tuned_model_calls_tools_that_it_has_not_seen(smollm2, shared, tmp_path):
    records = first_calls(shared)
    names = [json.loads(record["conversations"][1]["value"])["name"] for record in records]
    unseen = [n for n, name in enumerate(names) if names.count(name) == 1][-UNSEEN:]
    data = tmp_path / "calls.json"
    data.write_text(json.dumps([record for n, record in enumerate(records) if n not in unseen]))
    recipe = tmp_path / "tools.yaml"
    recipe.write_text(
        f"model: {{path: {smollm2}, chat_template: chatml}}\noutput: {tmp_path / 'run'}\n"
        f"data: {{train: {data}, max_length: 256}}\nmethod: {{kind: lora, rank: 16}}\n"
        f"train: {{steps: {UPDATES}, batch_size: 2}}\noptimizer: {{learning_rate: 1e-3}}\n"
    )
    meshtune.train(str(recipe))
    options = {"dtype": "float32", "quantize": "auto", "chat_template": None}
    called = {"tuned": 0, "SmolLM2": 0}
    models = load_served(str(tmp_path / "run"), "tuned", {}, **options)
    base = next(name for name in models if name != "tuned")
    with serving(Models(models, rows=1, queue=8)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for n in unseen:
            question, answer = records[n]["conversations"]
            tools = [{"type": "function", "function": tool} for tool in json.loads(records[n]["tools"])]
            request = {"messages": [{"role": "user", "content": question["value"]}], "tools": tools, "temperature": 0}
            for name, model in (("tuned", "tuned"), ("SmolLM2", base)):
                choice = client.chat.completions.create(model=model, max_tokens=80, **request).choices[0]
                calls = choice.message.tool_calls or []
                if calls and choice.finish_reason == "tool_calls":
                    assert calls[0].function.name in [tool["function"]["name"] for tool in tools]
                    called[name] += calls[0].function.name == json.loads(answer["value"])["name"]
    assert called["tuned"] >= UNSEEN - 2  # all, where it was tried; the base called none
    assert called["tuned"] > called["SmolLM2"]
