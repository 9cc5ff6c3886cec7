"""The predicted memory of a step against what a process takes on this CPU, and how a run reports both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from meshtune.train.report.banner import MeasuredStep, Prediction, StepProbe, predicted_vs_measured
from meshtune.train.report.events import Saved, Stepped

STEP = """
    import dataclasses, gc, json, sys
    import jax, numpy as np
    from meshtune.config.load import load_recipe
    from meshtune.plan.program import step_of
    from meshtune.setup.search import predict_candidate
    from meshtune.setup.search import workload_of
    from meshtune.costs.hardware import find_target
    from meshtune.train.report.banner import high_water_bytes, predict, reset_high_water_mark, resident_bytes
    recipe = load_recipe(sys.argv[1], sys.argv[2:])
    program = step_of(recipe)
    compiled = program.lower().compile()
    target = find_target("CPU", {})
    prediction = predict(compiled, recipe, target, program.layout, program.length)
    arguments = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype) + leaf.dtype.type(1), program.arguments)
    state, frozen, batch, seed = jax.tree.map(jax.numpy.array, arguments)
    jax.block_until_ready((state, frozen))
    del arguments
    gc.collect()
    assert reset_high_water_mark()
    before = resident_bytes()
    state, metrics = compiled(state, frozen, batch, seed)
    jax.block_until_ready((state, metrics))
    measured = prediction.argument_bytes + high_water_bytes() - before
    estimated = predict_candidate(recipe, target, workload_of(recipe, "cpu")).estimate.device_bytes
    print(json.dumps([prediction.device_bytes, measured, estimated]))
"""
CONFIG = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def run_one_update(folder, *overrides):
    """(predicted, measured, estimated) bytes of one update in a separate process."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    file = folder / "recipe.yaml"
    file.write_text(
        f"model: {folder}\ndata: {{train: nothing.jsonl, max_length: 512}}\noutput: {folder}/out\n"
        "mesh: {fsdp: 1}\ntrain: {batch_size: 4, steps: 10}\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    env.pop("XLA_FLAGS", None)
    command = [sys.executable, "-c", textwrap.dedent(STEP), str(file), *overrides]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize(
    "overrides",
    [
        ["compute.remat=selective", "train.batch_size=2"],
        pytest.param(["method=full", "compute.remat=full"], marks=pytest.mark.slow),
    ],
)
def test_the_predicted_peak_is_the_memory_the_process_takes(tmp_path, overrides):
    predicted, measured, _ = run_one_update(tmp_path / "model", *overrides)
    assert predicted > 100 * 2**20, "too small to be distinguished from the process itself"
    # 8%: buffers of XLA's runtime beside the program's (scratch of threads in matrix products), and page granularity.
    assert measured == pytest.approx(predicted, rel=0.08)


def step_event(step, seconds):
    return Stepped(step, 0.0, 1.0, 1.0, 1e-3, {}, 10, 10, seconds, 0)


def test_the_median_update_is_measured_without_the_first_ones():
    probe = StepProbe(Prediction(2**30, 2**29, 1.0, 0.4, "1xH100"))
    for step, seconds in enumerate([9.0, 5.0, 4.0, 1.0, 1.2, 1.1, 1.0], 1):
        probe.receive(step_event(step, seconds))
    probe.receive(Saved(7, None))  # pyright: ignore[reportArgumentType]
    probe.receive(step_event(8, 30.0))
    measured = probe.measurement()
    assert measured.updates == 4
    assert measured.step_seconds == pytest.approx(1.05)


def test_prediction_and_measurement_are_compared_only_where_both_are_known():
    prediction = Prediction(10 * 2**30, 2**30, 0.5, 0.4, "1xH100")
    memory, time = predicted_vs_measured(prediction, MeasuredStep(11 * 2**30, 0.75, 40))
    assert memory == "10.0 GiB of memory per device, 11.0 GiB measured (+10%)"
    assert time == "0.5 s per update, 0.75 s measured (1.50 times as long; the median of 40)"
    assert predicted_vs_measured(prediction, MeasuredStep(None, None, 0)) == []
    (time,) = predicted_vs_measured(Prediction(None, None, 0.0242, None, "CPU"), MeasuredStep(None, 0.2, 150))
    assert time == "0.0242 s per update, 0.2 s measured (too short to compare; the median of 150)"
