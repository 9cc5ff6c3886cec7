"""A model that sees computes the same however its rows are filled, cut, stored, adapted, updated and spread."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from twins import in_peft, move_weights

from families.case import directory, torch_model
from families.vision import mesh_step
from families.vision.cases import CASES
from families.vision.sights import (
    PLAIN,
    Document,
    VisionCase,
    batch_of,
    ids_of,
    load,
    mean_loss,
    our_logits,
    torch_run,
    tower_targets,
    turns_of,
    words,
)
from families.vision.test_parity import close_gradients, documents_of, patches_of, room_for
from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.adapters.peft_format import BaseRecord, attach, load_adapter, save_adapter
from meshtune.adapters.targets import modules, partial_layers
from meshtune.adapters.training_method import VisionTraining
from meshtune.arrays.tree import flatten, merge, unflatten
from meshtune.errors import UserError
from meshtune.model.spec import abstract_params
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.rollout.shared import shared_prompts_obstacle
from meshtune.runs.export import export
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import init_state
from meshtune.weights.export import export_model
from meshtune.weights.load import load_params, load_spec

# In the fast tier one of them, with tiles and a class token.
FAST = ("internvl",)
every_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name in FAST else pytest.mark.slow, id=case.name)
        for case in CASES
        if not case.case.variant
    ],
)
EVERYTHING = VisionTraining(("projector", "tower"), False)


def padded_rows(documents: list[Document]) -> dict[str, jax.Array]:
    """A row for each document."""
    return batch_of([[document] for document in documents], room_for(documents[:1]), patches_of(documents[0]))


@every_case
def test_packed_padded_and_chunked_rows_give_the_same_gradients(case: VisionCase):
    """Two documents in one row, in any order and by chunks of tokens, against rows of one each."""
    spec, params = load(case)
    documents = documents_of(case)
    gradient = jax.jit(jax.grad(mean_loss), static_argnums=(1, 3))
    padded = gradient(params, spec, padded_rows(documents), PLAIN)
    packed = batch_of([[documents[1], documents[0]]], room_for(documents), 2 * patches_of(documents[0]))
    close_gradients(gradient(params, spec, packed, PLAIN), padded, case.rounding)
    chunked = dataclasses.replace(PLAIN, remat="full", attention_chunk=16, mlp_chunk=16)
    close_gradients(gradient(params, spec, packed, chunked), padded, case.rounding)


@every_case
def test_completions_after_a_shared_prompt_with_pictures_have_the_logits_of_rows_that_repeat_it(case: VisionCase):
    """A prompt of two pictures once in a row, and two completions that continue it, beside transformers: within 1e-5 of
    the largest logit."""
    spec, params = load(case)
    if shared_prompts_obstacle(spec, PLAIN) is not None:
        pytest.skip("its layers cannot share a prompt")
    prompt, completions = documents_of(case)[0], [words(5, 7), words(9, 8)]
    ids = ids_of(prompt)
    start, length = len(ids) - 1, len(ids) - 1 + 5 + 9 + 2
    batch = {name: np.array(array) for name, array in batch_of([[prompt]], length + 3, patches_of(prompt)).items()}
    batch["parent_ids"], place = np.zeros_like(batch["tokens"]), start
    spans = []
    for segment, completion in enumerate(completions, 2):
        own = [ids[-1], *completion]
        span = slice(place, place := place + len(own))
        spans.append(span)
        whole = [*prompt, completion]
        batch["tokens"][0, span], batch["positions"][0, span] = own, start + np.arange(len(own))
        batch["segment_ids"][0, span], batch["parent_ids"][0, span] = segment, 1
        if "reach" in batch:
            batch["reach"][0, span] = batch["positions"][0, span]
        if "mrope_positions" in batch:
            batch["mrope_positions"][0, span] = turns_of(whole)[start:]
    assert not batch["visual"][0, start:].any()
    ours = our_logits(params, spec, batch, dataclasses.replace(PLAIN, shared_prompts=True))
    with torch.no_grad():
        theirs, _ = torch_run(torch_model(case.case), [[*prompt, completion] for completion in completions])
    for span, expected in zip(spans, theirs, strict=True):
        difference = np.abs(np.asarray(ours[0, span]) - expected[start:]).max()
        assert difference <= 1e-5 * np.abs(expected).max()


@every_case
def test_files_are_written_as_they_came(case: VisionCase, tmp_path: pathlib.Path):
    """Every tensor by its name and to the byte, through the parameters; read again by transformers' own names."""
    spec, params = load(case)
    out = export_model(params, spec, directory(case.case), tmp_path / "out").path
    before, after = load_file(directory(case.case) / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, strict=True, err_msg=name)


@every_case
def test_what_is_trained_is_said_part_by_part(case: VisionCase):
    spec, _ = load(case)
    for parts, roots in ((("projector",), {"projector"}), (("projector", "tower"), {"projector", "vision"})):
        assert abstract(FullConfig(), spec, vision=VisionTraining(parts, True)).trainable.keys() == roots
    with pytest.raises(UserError, match="nothing else is trained"):
        abstract(FullConfig(), spec, vision=VisionTraining((), True))
    language = abstract(FullConfig(), spec)
    assert not {"vision", "projector"} & language.trainable.keys()
    adapted = abstract(LoraConfig(rank=2), spec).trainable
    assert adapted
    assert not {"vision", "projector"} & adapted.keys()
    beside = abstract(LoraConfig(rank=2), spec, vision=VisionTraining(("projector",), False))
    assert beside.trainable.keys() == adapted.keys() | {"projector"}


@every_case
def test_lora_over_nf4_leaves_the_tower_plain(case: VisionCase):
    quantize = QuantizeConfig("nf4", 8, double=False)
    plain, _ = load_spec(directory(case.case), "float32", vision=True)
    arrays = abstract(LoraConfig(rank=2), plain, quantize=quantize)
    params = load_params(directory(case.case), arrays.spec, quantize=quantize)
    coded = {path for path, leaf in flatten(params).items() if isinstance(leaf, QuantisedWeight)}
    assert coded
    assert all(path.startswith("layers/") for path in coded)
    wide = {p: leaf.dequantise("float32") if p in coded else leaf for p, leaf in flatten(params).items()}
    documents = documents_of(case)
    batch = padded_rows(documents)
    np.testing.assert_allclose(
        our_logits(params, arrays.spec, batch), our_logits(unflatten(wide), arrays.spec, batch), atol=1e-4
    )


@pytest.mark.slow
@every_case
def test_updates_in_the_backward_pass_are_those_of_the_plain_gradient(case: VisionCase):
    spec, params = load(case)
    documents = documents_of(case)
    batch = padded_rows(documents)
    expected = jax.jit(jax.grad(mean_loss), static_argnums=1)(params, spec, batch)
    method = FullConfig(train_router=True)
    prepared = prepare(method, spec, params, jax.random.key(0), vision=EVERYTHING)
    rate = 1024.0  # the sum of a weight near one and of a small gradient would lose the gradient's last digits
    config = OptimizerConfig("sgd", rate, "constant", in_backward=True)
    arrays = abstract(method, spec, vision=EVERYTHING)
    optimizer, _ = make_optimizer(config, 10, arrays.trainable, prepared.spec)
    step = make_train_step(sft_objective, prepared.spec, dataclasses.replace(PLAIN, remat="full"), optimizer)
    before = jax.tree.map(np.array, prepared.trainable)
    micro = {name: array[None] for name, array in batch.items()}
    state, _ = step(init_state(prepared.trainable, optimizer), prepared.frozen, micro, jnp.int32(0))
    moves = jax.tree.map(lambda old, new: (old - np.asarray(new)) / rate, before, state.trainable)
    roles = {path: array.role for path, array in flatten(abstract_params(spec)).items()}
    trained = {path: leaf for path, leaf in flatten(expected).items() if roles[path] != "buffer"}
    assert flatten(moves).keys() == trained.keys()
    close_gradients(moves, unflatten(trained), max(5e-5, case.rounding))


@pytest.mark.slow
@every_case
def test_an_adapter_of_the_tower_has_the_same_logits_in_peft(case: VisionCase, tmp_path: pathlib.Path):
    spec, params = load(case)
    config = LoraConfig(rank=2, targets=tower_targets(spec))
    prepared = prepare(config, spec, params, jax.random.key(0))
    trained = move_weights(prepared.trainable)
    assert spec.vision is not None
    assert any(path.startswith("vision/") for path in flatten(trained)) == bool(spec.vision.layers)
    documents = documents_of(case)
    batch = padded_rows(documents)
    ours = np.asarray(our_logits(merge(trained, prepared.frozen), prepared.spec, batch))
    save_adapter(tmp_path / "adapter", trained, prepared.spec, config, BaseRecord("some/base", "sha256:0"))
    model = torch_model(case.case)
    plain, _ = torch_run(model, documents)
    theirs, _ = torch_run(in_peft(model, tmp_path / "adapter"), documents)
    for row, expected in enumerate(theirs):
        np.testing.assert_allclose(ours[row, : len(expected)], expected, atol=1e-4, rtol=1e-4)
    assert np.abs(plain[0] - theirs[0]).max() > 0.01, "the adapter changes nothing"


@pytest.mark.slow
@every_case
def test_an_adapter_of_peft_on_everything_has_the_same_logits_here(case: VisionCase, tmp_path: pathlib.Path):
    """peft's all-linear means the tower and the projector too."""
    spec, params = load(case)
    targets = [m.name for m in modules(spec).values() if m.linear and m.node != "head" and m.role == "matrix"]
    if (partial := partial_layers(spec, modules(spec))) is not None:  # which peft adapts as well
        others = dict(torch_model(case.case).named_modules())
        targets += [n for n, m in others.items() if n.startswith(partial) and isinstance(m, torch.nn.Linear)]
    options = peft.LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", target_modules=targets)
    model = peft.get_peft_model(torch_model(case.case), options).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(str(tmp_path))
    spec, params = attach(params, spec, load_adapter(tmp_path, spec))
    documents = documents_of(case)
    batch = padded_rows(documents)
    ours = np.asarray(our_logits(params, spec, batch))
    for row, expected in enumerate(torch_run(model, documents)[0]):
        np.testing.assert_allclose(ours[row, : len(expected)], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@every_case
def test_a_tower_trained_in_full_beside_adapters_is_read_by_peft(case: VisionCase, tmp_path: pathlib.Path):
    spec, params = load(case)
    config = LoraConfig(rank=2, targets=("self_attn.q_proj",))
    prepared = prepare(config, spec, params, jax.random.key(0), vision=EVERYTHING)
    trained = jax.tree.map(lambda x: x + 0.05 * jnp.cos(jnp.arange(x.size).reshape(x.shape)), prepared.trainable)
    documents = documents_of(case)
    batch = padded_rows(documents)
    ours = np.asarray(our_logits(merge(trained, prepared.frozen), prepared.spec, batch))
    adapter = save_adapter(tmp_path / "adapter", trained, prepared.spec, config, BaseRecord("some/base", "sha256:0"))
    theirs, _ = torch_run(in_peft(torch_model(case.case), adapter), documents)
    for row, expected in enumerate(theirs):
        np.testing.assert_allclose(ours[row, : len(expected)], expected, atol=1e-4, rtol=1e-4)
    read = load_adapter(adapter, spec)
    assert all(jax.tree.map(np.array_equal, flatten(trained), flatten(read.trainable)).values())


@pytest.mark.slow
@every_case
def test_an_adapter_of_the_tower_is_merged_into_the_files(case: VisionCase, tmp_path: pathlib.Path):
    """As transformers reads them, which computes what the adapter beside its base computes."""
    spec, params = load(case)
    config = LoraConfig(rank=2, targets=tower_targets(spec))
    prepared = prepare(config, spec, params, jax.random.key(0))
    trained = move_weights(prepared.trainable)
    documents = documents_of(case)
    ours = np.asarray(our_logits(merge(trained, prepared.frozen), prepared.spec, padded_rows(documents)))
    adapter = save_adapter(tmp_path / "adapter", trained, prepared.spec, config, BaseRecord("base"))
    out = export(adapter, tmp_path / "out", base=directory(case.case), merge=True).path
    merged = transformers.AutoModelForImageTextToText.from_pretrained(out, dtype="float32", attn_implementation="eager")
    for row, expected in enumerate(torch_run(merged.eval(), documents)[0]):
        np.testing.assert_allclose(ours[row, : len(expected)], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@every_case
def test_eight_devices_change_nothing(case: VisionCase, tmp_path: pathlib.Path):
    """Simulated devices against one, in float64: loss and the norm of every gradient, within 1e-8; those of biases of
    keys, which cancel out in a softmax, within 1e-12 of zero. Every weight; and adapters in tower, projector and
    language model over nf4."""
    documents = documents_of(case)
    batch = padded_rows([*documents, *documents])
    np.savez(tmp_path / "batch.npz", **{name: np.asarray(array) for name, array in batch.items()})
    program = [sys.executable, mesh_step.__file__, str(directory(case.case.changed(vocab_size=96))), str(tmp_path)]
    run = subprocess.run(program, capture_output=True, text=True, env=os.environ, timeout=1500)
    assert run.returncode == 0, run.stderr[-3000:]
    for form, (single, several) in json.loads(run.stdout.splitlines()[-1]).items():
        assert single.keys() == several.keys()
        assert sum(value > 1e-6 for value in single.values()) > 0.8 * len(single)
        for name, expected in single.items():
            np.testing.assert_allclose(several[name], expected, rtol=1e-8, atol=1e-12, err_msg=f"{form}: {name}")
