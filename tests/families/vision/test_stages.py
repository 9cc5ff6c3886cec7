"""One update of DPO and one of GRPO of every family that sees, from records with pictures to the gradient of every
weight, beside transformers and trl.

Full tuning of tower, projector and language model: losses within 1e-5, every gradient within 1e-4 of its norm, and
log-probabilities of reference, sampler and trainer within 1e-4, as float32 sums in other orders are.
"""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
import torch
from rich.console import Console
from test_policy import trl_options, trl_trainer
from trl import GRPOTrainer

from families.case import write_model
from families.vision.cases import CASES
from families.vision.checkpoints import answer_log_probs, open_in_torch, tables_with_padding
from families.vision.sights import VisionCase
from families.vision.test_parity import close_gradients
from families.vision.test_programs import recipe_of
from meshtune.arrays.tree import flatten, merge, unflatten
from meshtune.config.recipe import Recipe
from meshtune.data.loader import Loader
from meshtune.data.pictures.expansion import read_pictures
from meshtune.mesh.placement import place_batch
from meshtune.mesh.processes import Job
from meshtune.mesh.rendezvous import ProcessInfo
from meshtune.rollout.saved import FOLDER, decode_rollout, read_rollout
from meshtune.setup.stage import objective_of
from meshtune.train.assemble import LoadedRun, load_run
from meshtune.train.evaluation.reference import Reference
from meshtune.train.online import rollout_source
from meshtune.train.report.progress import log_console
from meshtune.train.run_setup import set_up_run
from meshtune.train.step.state import TrainState
from meshtune.weights.load import load_params

pytestmark = pytest.mark.slow  # half a minute each
every_case = pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES if not c.case.variant])
EVERYTHING = ("method=full", 'vision.train=["projector","tower"]')
REWARD = """
def order(completions, **columns):
    return [float(number) for number, _ in enumerate(completions)]
"""


def load(recipe: Recipe) -> tuple[LoadedRun, TrainState]:
    """A run and the state that it starts with; answers of pairs have the reference's log-probabilities."""
    console = Console(quiet=True)
    with log_console(console) as log:
        prepared = set_up_run(recipe, pathlib.Path(recipe.output), console, log, Job(ProcessInfo()))
    run, state = load_run(prepared)
    if isinstance(prepared.data.train, Loader):
        Reference(prepared).from_start(run.model.parameters, run.model.spec)
    return run, state


def check_update(
    run: LoadedRun, state: TrainState, batch: dict[str, np.ndarray], loss: torch.Tensor, theirs: torch.nn.Module
) -> None:
    """The loss of a batch and its gradients are transformers', but for rows of embeddings that it never trains."""
    loss.backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for buffer in theirs.buffers():
            buffer.zero_()
    expected, objective = load_params(write_model(theirs), run.model.spec), objective_of(run.recipe)  # pyright: ignore

    @jax.jit
    def both(params):
        def mean(params):
            score = objective(params, run.model.spec, run.compute, batch, None)  # pyright: ignore
            return score.loss / score.weight

        return jax.value_and_grad(mean)(params)

    value, gradient = both(merge(state.trainable, run.model.frozen))
    assert float(value) == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    flat = flatten(gradient)
    if tables_with_padding(theirs):
        flat |= {name: flat[name].at[0].set(0) for name in flat.keys() & {"embed/weight", "per_layer/table/weight"}}
    close_gradients(unflatten(flat), expected)
    assert any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradient["vision"]))


@every_case
def test_an_update_of_dpo_is_that_of_transformers(case: VisionCase, tmp_path, monkeypatch):
    """The log-probabilities of the start as its reference are transformers'; then another reference."""
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    changes = ("stage.kind=dpo", "stage.beta=0.3", "train.batch_size=4", "train.micro_batch=4", *EVERYTHING)
    run, state = load(recipe_of(case, tmp_path, *changes, pairs=True, records=4))
    loader, theirs = run.data.train, open_in_torch(tmp_path / "model")
    assert isinstance(loader, Loader)
    assert loader.pictures is not None
    sums = []
    for example in (loader.store[document] for document in range(len(loader.store))):
        files = [item.picture.path for item in read_pictures(example.extra)]
        start = int(np.argmax(example.weights > 0))
        every = answer_log_probs(theirs, loader.pictures.reader, example.ids.tolist(), files, start)
        sums.append(every[torch.tensor(example.weights[start:] > 0)].sum())
    assert loader.units is not None
    assert loader.units.reference is not None
    np.testing.assert_allclose(loader.units.reference, [value.item() for value in sums], atol=1e-4)
    batch = {name: array[0] for name, array in loader.batch(0).arrays.items()}
    assert batch["units"].sum() == 4
    batch["reference"] = batch["reference"] + np.where(np.arange(batch["reference"].shape[1]) % 2, 0.5, -0.5)
    logits = [chosen - rejected for chosen, rejected in zip(sums[::2], sums[1::2], strict=True)]
    margins = torch.stack([value - value.item() + 1 for value in logits])
    check_update(run, state, batch, -torch.nn.functional.logsigmoid(0.3 * margins).mean(), theirs)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name) for c in CASES if not (c.case.variant or c.name.startswith("paligemma"))]
)
def test_an_update_of_grpo_is_that_of_trl(case: VisionCase, tmp_path, monkeypatch):
    """Completions that are drawn here, with trl's loss of transformers' log-probabilities."""
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "reward.py").write_text(REWARD)
    stage = ('stage={"kind":"grpo","loss":"grpo","beta":0.1}', 'rollout={"prompts":2,"samples":2,"max_tokens":4}')
    changes = (*stage, f"rewards={json.dumps([f'{tmp_path}/reward.py:order'])}", "train={steps: 1}", *EVERYTHING)
    run, state = load(recipe_of(case, tmp_path, *changes, records=4))
    place = functools.partial(place_batch, layout=None, order=None)
    source = rollout_source(run, place, None, start=0)
    batch = {name: array.reshape(-1, *array.shape[2:]) for name, array in source.next(0, state).arrays.items()}
    source.close()
    content = read_rollout(tmp_path / "run" / FOLDER, 0)
    assert content is not None
    rollout, theirs = decode_rollout(content), open_in_torch(tmp_path / "model")
    assert rollout is not None
    records = [source.loader.record(number) for number in rollout.prompts for _ in range(2)]
    assert source.loader.pictures is not None
    reader = source.loader.pictures.reader
    log_probs = [
        answer_log_probs(theirs, reader, [*r.ids, *c.ids], r.columns["images"], len(r.ids))
        for r, c in zip(records, rollout.completions, strict=True)
    ]
    lengths = [len(completion.ids) for completion in rollout.completions]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    references = [value.detach().numpy() + np.float32(0.2 * np.cos(np.arange(len(value)))) for value in log_probs]
    own = rollout.per_completion("reference_tokens")
    for completion, reference, expected in zip(rollout.completions, own, log_probs, strict=True):
        for values in (completion.log_probs, reference):
            np.testing.assert_allclose(values, expected.detach().numpy(), atol=1e-4)
    batch["reference_tokens"] = source._lay_out(records, rollout.completions).scatter(references)

    def pad(values):
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)

    trainer = trl_trainer(GRPOTrainer, trl_options({"loss": "grpo", "beta": 0.1}), theirs)
    padded = pad(log_probs)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (padded, torch.zeros_like(padded), None)
    inputs = {"prompt_ids": mask, "prompt_mask": mask, "completion_ids": mask, "completion_mask": mask}
    inputs |= {"ref_per_token_logps": pad([torch.tensor(value) for value in references])}
    inputs |= {"advantages": torch.tensor(rollout.advantages).float()}
    assert np.any(rollout.advantages)
    check_update(run, state, batch, GRPOTrainer._compute_loss(trainer, theirs, inputs), theirs)
