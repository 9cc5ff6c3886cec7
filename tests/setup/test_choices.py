"""Automatic values of a recipe: dtypes, learning rates, meshes, and overrides in the form of command-line arguments."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import pytest

import meshtune
from meshtune.arrays.tree import named_leaves
from meshtune.config.load import load_recipe
from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import find_target
from meshtune.errors import UserError
from meshtune.setup.choices import compute_of, learning_rate_of, mesh_of, optimizer_of, precision_of
from meshtune.setup.machine import Machine, local_target, this_machine
from meshtune.setup.run import resolve_run
from meshtune.setup.search import apply_overrides, autotune, open_keys, override_arguments

MODEL = pathlib.Path(meshtune.__file__).parent / "quickstart/model"
FREEZE = ("method.kind=freeze", "method.last_layers=1")
ONE_DEVICE = "mesh={}"
IN_BACKWARD = ("method=full", "optimizer.in_backward=true", "optimizer.max_grad_norm=null")


def recipe(*overrides: str) -> Recipe:
    return load_recipe({"model": str(MODEL), "data": {"train": "none.jsonl"}, "output": "out"}, overrides)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("precision", ["mixed", "float32", "bfloat16"])
def test_arrays_have_the_dtypes_of_the_precision(method, precision):
    """The base is stored in float32: mixed keeps it where it is trained, and rounds frozen weights under adapters."""
    run = resolve_run(recipe(f"method={method}", f"compute.precision={precision}", ONE_DEVICE), this_machine())
    trained = {array.dtype for _, array in named_leaves(run.arrays.trainable)}
    frozen = {array.dtype for _, array in named_leaves(run.arrays.frozen)}
    assert trained == {"bfloat16" if precision == "bfloat16" else "float32"}
    assert frozen <= {"float32" if precision == "float32" else "bfloat16"}
    assert bool(frozen) == (method == "lora")
    assert run.precision.compute == ("float32" if precision == "float32" else "bfloat16")


@pytest.mark.parametrize(("backend", "expected"), [("cpu", "float32"), ("cuda", "mixed"), ("rocm", "mixed")])
def test_precision_is_mixed_on_accelerators_and_float32_on_a_cpu(backend, expected):
    precision, decision = precision_of(recipe(), "bfloat16", backend)
    assert precision.name == decision.value == expected
    assert "auto" in decision.reason


@pytest.mark.parametrize(
    ("model_type", "arch", "expected"),
    [("llama", "sm_75", "float16"), ("llama", "gfx906", "float16"), ("gemma2", "sm_75", "float32"),
     ("gemma3_text", "sm_70", "float32"), ("gemma2", "sm_80", "mixed"), ("llama", "gfx1100", "mixed")],
)  # fmt: skip
def test_a_chip_without_bfloat16_computes_in_float16_where_the_model_does_not_overflow(model_type, arch, expected):
    platform, config = "rocm" if arch.startswith("gfx") else "cuda", {"model_type": model_type}
    precision, decision = precision_of(recipe(), "bfloat16", platform, arch, config)
    assert precision.name == expected
    assert ("no bfloat16" in decision.reason) == (expected != "mixed")
    assert ("twice the memory" in decision.reason) == (expected == "float32")


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3", "gpt_oss"])
def test_float16_is_refused_for_a_model_that_overflows_in_it(model_type):
    config = {"model_type": model_type, "text_config": {"model_type": "gemma3_text"}}
    with pytest.raises(UserError, match=r"overflow in float16: (vLLM|Unsloth)") as caught:
        precision_of(recipe("compute.precision=float16"), "bfloat16", "cuda", "sm_75", config)
    assert "mixed" in caught.value.fix
    assert "float32" in caught.value.fix


def test_weights_that_are_trained_keep_their_stored_precision():
    """Frozen float32 weights of a freeze run lie next to trained ones of the same kind."""
    assert precision_of(recipe(*FREEZE), "float32", "cuda")[0].frozen == "float32"
    assert precision_of(recipe(*FREEZE), "bfloat16", "cuda")[0].frozen == "bfloat16"
    assert precision_of(recipe("method=lora"), "float32", "cuda")[0].frozen == "bfloat16"


# docs/faq.md and docs/methods.md; preference stages in trl: 1e-6 where SFT has 2e-5 and more, a tenth here.
@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        (["method=lora"], 2e-4),
        (["method=full"], 2e-5),
        (["method=full", "stage=dpo"], 2e-6),
        (["method=lora", "stage=kto"], 2e-5),
        (["method=lora", "stage=rm"], 2e-4),
        (["method=lora", "optimizer.name=prodigy"], 1.0),
        (["method=lora", "stage=dpo", "optimizer.learning_rate=3e-5"], 3e-5),
    ],
)
def test_a_learning_rate_that_is_not_set_is_that_of_method_and_stage(changes, rate):
    assert learning_rate_of(recipe(*changes)) == pytest.approx(rate)


def test_an_optimizer_has_the_recipes_options_and_its_seed():
    asked = recipe("optimizer.beta2=0.9", "optimizer.weight_decay=0.3", "seed=7")
    config = optimizer_of(asked, precision_of(asked, "float32", "cpu")[0])
    assert (config.beta2, config.weight_decay, config.seed, config.learning_rate) == (0.9, 0.3, 7, 2e-4)
    assert config.state_dtype is None
    lean = recipe("compute.precision=bfloat16")
    state_dtype = optimizer_of(lean, precision_of(lean, "float32", "cpu")[0]).state_dtype
    assert jnp.dtype(state_dtype).itemsize == 2


def test_a_mesh_takes_the_devices_that_are_left():
    spec = resolve_run(recipe(ONE_DEVICE), this_machine()).spec
    assert mesh_of(recipe("mesh.fsdp=-1", "mesh.tp=2"), 8, spec)[0].sizes["fsdp"] == 4
    assert mesh_of(recipe("mesh.fsdp=2"), 8, spec)[0].devices == 2
    with pytest.raises(UserError):
        mesh_of(recipe("mesh.fsdp=-1", "mesh.tp=3"), 8, spec)


@pytest.mark.parametrize(
    "overrides",
    [
        {"train.micro_batch": 4},
        {"compute.remat": "full", "compute.offload": ["residual", "optimizer"]},
        {"mesh": {"fsdp": 4, "tp": 2}},
        {"quantize": "nf4", "compute.mlp_chunk": 1024},
    ],
)
def test_overrides_are_the_arguments_that_a_user_would_type(overrides):
    """Values that the search tries without validation are those that validation gives."""
    assert apply_overrides(recipe(), overrides) == recipe(*override_arguments(overrides))


def test_recomputation_is_searched_unless_the_optimizer_fixes_it():
    target = find_target("8xH100", env={})
    assert "compute.remat" in open_keys(recipe())
    chosen, decisions = autotune(recipe("train.micro_batch=1"), target)
    assert chosen.compute.remat in ("selective", "full")
    assert "remat" in {decision.name for decision in decisions}
    fixed = recipe(*IN_BACKWARD, ONE_DEVICE)
    assert "compute.remat" not in open_keys(fixed)
    run = resolve_run(fixed, this_machine())
    compute, _ = compute_of(fixed, run.spec, run.precision, 1, 64)
    assert compute.remat == "full"


def test_a_job_is_a_target_of_its_devices():
    machine = this_machine()
    assert local_target(machine).devices == len(machine.devices)
    spread = Machine(machine.platform, machine.devices * 4)
    target = local_target(spread, hosts=2)
    assert (target.hosts, target.per_host) == (2, 2 * len(machine.devices))
    assert target.device.memory < local_target(machine).device.memory  # a host's memory is shared by its devices
