"""Cases that `test_run_mesh.py` runs on four simulated devices: python mesh_use_cases.py RECIPE FOLDER.

Trains a run on a mesh, then uses it by every command, on that mesh and on one device.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import httpx
import jax
import numpy as np

from meshtune.cli.main import main
from meshtune.cli.model_options import parse_mesh
from meshtune.generate import api
from meshtune.serve.models import Models, load_served
from serve.serving import serving

MESH = ("mesh=run",)
PROMPT = "Once upon a time"
used: list[tuple[tuple[str, int], ...]] = []  # the meshes that models were laid out on


def layout_for(mesh, spec, original=api.layout_for):
    used.append(tuple((axis, size) for axis, size in mesh.shape.items() if size > 1))
    return original(mesh, spec)


def command(*arguments: object, stdin: str = "") -> str:
    """Returns a command's output. Raises AssertionError if it fails."""
    before, sys.stdin = sys.stdin, io.StringIO(stdin)
    code: object = 0
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdin = before
    assert not code, (arguments, code, printed.getvalue())
    return printed.getvalue()


def texts(run: Path, *mesh: str) -> list[str]:
    """Returns the texts of `generate`, `chat` and a server."""
    generated = command("generate", run, *mesh, "--no-chat", "-p", PROMPT, "-n", "20")
    options = ("--chat-template", run.parent / "template.jinja", "--temperature", "0", "-n", "8")
    talked = command("chat", run, *mesh, *options, stdin=f"{PROMPT}\n/exit\n")
    loading = {"dtype": None, "quantize": "auto"}
    models = Models(
        load_served(str(run), "tuned", {}, mesh=parse_mesh(list(mesh), str(run)), **loading), rows=2, queue=9
    )
    models.warm_up()
    served = []
    with serving(models) as address:
        for number in (8, 12):
            body = {"model": "tuned", "prompt": PROMPT, "max_tokens": number, "temperature": 0}
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=300)
            assert answer.status_code == 200, answer.text
            served.append(answer.json()["choices"][0]["text"])
    assert min(map(len, (generated, *served))) > 1
    return [generated, talked, *served]


def numbers(run: Path, records: Path, out: Path, *mesh: str) -> tuple[list[str], dict[str, list[float]]]:
    """The answers of `predict` and of `eval --compare base`, with their losses and the metrics of a task."""
    command("predict", run, *mesh, "--data", records, "-n", "12", "--output", out / "predict", "--metrics", "f1")
    options = ("--compare", "base", "--tasks", f"perplexity={records.with_name('text.jsonl')}")
    options = (*options, "--data", records, "--max-tokens", "4", "--metrics", "f1", "--output", out / "eval")
    command("eval", run, *mesh, *options)
    answers, values = [], {}
    for name in ("predict", "eval/base", "eval/tuned"):
        rows = [json.loads(line) for line in (out / name / "predictions.jsonl").read_text().splitlines()]
        answers += [row["answer"] for row in rows]
        values[name] = [row["loss"] for row in rows]
    for name in ("eval/base", "eval/tuned"):
        (task,) = json.loads((out / name / "tasks.json").read_text())["tasks"]
        values[name] += [value for value in task["metrics"].values() if isinstance(value, float)]
    return answers, values


if __name__ == "__main__":
    recipe, folder = Path(sys.argv[1]), Path(sys.argv[2])
    assert jax.device_count() == 4
    api.layout_for = layout_for
    command("train", recipe)
    run, records = folder / "run", folder / "records.jsonl"
    on_mesh = texts(run, *MESH)
    answers, values = numbers(run, records, folder / "mesh", *MESH)
    assert set(used) == {(("fsdp", 2), ("tp", 2))}, used
    assert len(used) == 5, used
    used.clear()
    assert on_mesh == texts(run)
    assert on_mesh[0] == command("generate", run, "mesh.fsdp=1", "--no-chat", "-p", PROMPT, "-n", "20")
    expected, reference = numbers(run, records, folder / "one")
    assert not used
    assert answers == expected
    for name, losses in reference.items():
        # The same float32 sums over devices in another order.
        np.testing.assert_allclose(values[name], losses, rtol=1e-4, err_msg=name)
    assert np.abs(np.subtract(values["eval/base"], values["eval/tuned"])).min() > 1e-3, "the run has learned nothing"
