"""Online stages over prompts with pictures: rows compared with transformers and trl, and whole runs.

All prompts about pictures have the same tokens, so only their pixels tell them apart.
"""

from __future__ import annotations

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import torch
import transformers
from pictures_to_see import TEMPLATE, write_model, write_records
from PIL import Image
from rich.console import Console
from safetensors.numpy import load_file
from test_policy import trl_options, trl_trainer
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

import meshtune
from families.vision.test_parity import close_gradients
from meshtune.arrays.tree import merge
from meshtune.config.load import load_recipe
from meshtune.errors import UserError
from meshtune.mesh.placement import place_batch
from meshtune.mesh.processes import Job
from meshtune.mesh.rendezvous import ProcessInfo
from meshtune.rollout.saved import FOLDER, Rollout, decode_rollout, read_rollout
from meshtune.rollout.source import RolloutSource
from meshtune.runs.rollouts import read_rollouts
from meshtune.setup.stage import objective_of
from meshtune.train.assemble import LoadedRun, load_run
from meshtune.train.online import rollout_source
from meshtune.train.report.metrics_log import read
from meshtune.train.report.progress import log_console
from meshtune.train.run_setup import set_up_run
from meshtune.train.step.state import TrainState
from meshtune.weights.load import load_params

PROMPTS, SAMPLES = 4, 3
REWARD = """
def letters(completions, images, **columns):
    assert all(files is None or files[0].endswith(".png") for files in images)
    return [completion[0]["content"].count("e") + len(completion[0]["content"]) / 40 for completion in completions]


def nothing(completions, **columns):
    return [0.5] * len(completions)
"""


@pytest.fixture(scope="module")
def sections(tmp_path_factory) -> dict[str, object]:
    """The sections of a recipe for a tiny model, questions about pictures, and some without."""
    folder = tmp_path_factory.mktemp("seeing")
    data = write_records(folder / "data", 12)
    (folder / "reward.py").write_text(REWARD)
    return {
        "model": str(write_model(folder / "model")),
        "data": {"train": str(data), "max_length": 96, "shuffle": False},
        "vision": {"train": ["projector", "tower"]},
        "stage": {"kind": "grpo", "loss": "grpo", "beta": 0.1},
        "rollout": {"prompts": PROMPTS, "samples": SAMPLES, "max_tokens": 6},
        "rewards": [f"{folder}/reward.py:letters"],
        "method": "full",
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
        "train": {"steps": 2},
    }


def opened(sections, output: pathlib.Path, **changes) -> tuple[RolloutSource, LoadedRun, TrainState]:
    """The source of a run's batches, the run, and the state that it starts with."""
    recipe, console = load_recipe(sections | changes | {"output": str(output)}), Console(quiet=True)
    with log_console(console) as log:
        run, state = load_run(set_up_run(recipe, output, console, log, Job(ProcessInfo())))
    place = functools.partial(place_batch, layout=run.compute.layout, order=None)
    return rollout_source(run, place, None, start=0), run, state


def rollout_of(output: pathlib.Path, number: int = 0) -> Rollout:
    content = read_rollout(output / FOLDER, number)
    rollout = None if content is None else decode_rollout(content)
    assert rollout is not None
    return rollout


def trl_inputs(folder: pathlib.Path, source: RolloutSource, rollout: Rollout) -> dict[str, torch.Tensor]:
    """Prompts and completions as trl's GRPOTrainer gives them to its loss, with the pixels of transformers' processor
    for every completion."""
    processor = GotOcr2ImageProcessorPil.from_pretrained(folder)
    records = [source.loader.record(index) for index in rollout.prompts for _ in range(SAMPLES)]
    assert all(record.ids == records[0].ids for record in records), "only pixels tell the prompts apart"
    files = [file for record in records for file in record.columns["images"]]
    pixels = np.stack([processor([Image.open(file).convert("RGB")])["pixel_values"][0] for file in files])
    lengths = [len(completion.ids) for completion in rollout.completions]
    ids, mask = torch.zeros((2, len(records), max(lengths)), dtype=torch.long)
    for row, completion in enumerate(rollout.completions):
        ids[row, : lengths[row]], mask[row, : lengths[row]] = torch.tensor(completion.ids), 1
    prompts = torch.tensor([record.ids for record in records])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(rollout.advantages).float(),
        "pixel_values": torch.tensor(pixels),
        "num_images": [1] * len(records),
    }


@pytest.mark.parametrize("form", ["shared", "repeated", "alone"])
def test_loss_and_gradients_of_rows_equal_trls(sections, tmp_path, form):
    """Full tuning of tower, projector and language model: the loss within 1e-5, every gradient within 1e-4 of its
    norm, the log-probabilities of sampler, trainer and reference within 1e-5, as float32 sums in other orders are."""
    changes = {"rollout": sections["rollout"] | {"shared_prompts": form == "shared", "prompts": 2}}
    changes |= {"data": sections["data"] | {"packing": form != "alone"}}
    source, run, state = opened(sections, tmp_path, **changes)
    batch = {name: array.reshape(-1, *array.shape[2:]) for name, array in source.next(0, state).arrays.items()}
    source.close()
    rollout = rollout_of(tmp_path)
    assert ("parent_ids" in batch) == (form == "shared")
    used = [int((row > 0).sum()) for row in batch["patch_segments"]]
    copies = 2 if form == "shared" else 2 * SAMPLES
    assert sum(used) == copies * 16, "16 patches for each time that a prompt is in the rows"
    model = transformers.AutoModelForImageTextToText.from_pretrained(sections["model"]).float()
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    model.train()
    trainer = trl_trainer(GRPOTrainer, trl_options({"loss": "grpo", "beta": 0.1}), model)
    inputs = trl_inputs(pathlib.Path(sections["model"]), source, rollout)
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    pictures = {name: inputs[name] for name in ("pixel_values", "num_images")}
    with torch.no_grad():
        expected, *_ = trainer._get_per_token_logps_and_entropies(
            model, tokens, mask, inputs["completion_ids"].shape[1], **pictures
        )
    noise, reference = np.random.default_rng(0), torch.zeros(expected.shape)
    shifted = []
    for row, (completion, ours) in enumerate(
        zip(rollout.completions, rollout.per_completion("reference_tokens"), strict=True)
    ):
        theirs = expected[row, : len(completion.ids)].numpy()
        np.testing.assert_allclose(completion.log_probs, theirs, atol=1e-5)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        shifted.append(theirs + np.float32(0.3 * noise.normal(size=len(theirs))))
        reference[row, : len(theirs)] = torch.tensor(shifted[-1])
    loss = GRPOTrainer._compute_loss(trainer, model, inputs | {"ref_per_token_logps": reference})
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(tmp_path / "gradient")
    spec, objective = run.model.spec, objective_of(run.recipe)
    theirs = load_params(tmp_path / "gradient", spec)
    # A reference that is not the model, which would weigh nothing.
    spans = source._lay_out(
        [source.loader.record(n) for n in rollout.prompts for _ in range(SAMPLES)], rollout.completions
    )
    batch["reference_tokens"] = spans.scatter(shifted)

    @jax.jit
    def both(params):
        def mean(params):
            score = objective(params, spec, run.compute, batch, None)
            return score.loss / score.weight

        return jax.value_and_grad(mean)(params)

    value, gradient = both(merge(state.trainable, run.model.frozen))
    assert float(value) == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    close_gradients(gradient, theirs)
    assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradient["vision"]))


def test_the_reference_of_an_adapter_has_the_projector_that_the_run_started_with(sections, tmp_path):
    changes = {"method": {"kind": "lora", "rank": 4}, "vision": {"train": ["projector"]}}
    source, run, state = opened(sections, tmp_path, **changes)
    source.close()
    start = merge(state.trainable, run.model.frozen)
    changed = merge(jax.tree.map(lambda leaf: leaf + 1, state.trainable), run.model.frozen)
    assert source.model.reference is not None
    reference = source.model.reference(changed)
    jax.tree.map(np.testing.assert_array_equal, reference["projector"], start["projector"])


def test_equal_rewards_leave_every_weight_as_it_was(sections, tmp_path):
    stage = sections["stage"] | {"beta": 0.0}
    nothing = [str(sections["rewards"][0]).replace(":letters", ":nothing")]
    meshtune.train(sections | {"output": str(tmp_path / "run"), "rewards": nothing, "stage": stage})
    before, after = (
        load_file(pathlib.Path(path) / "model.safetensors") for path in (sections["model"], tmp_path / "run/model")
    )
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "rollout"),
    [
        ({"kind": "grpo", "beta": 0.1}, {"updates": 2, "iterations": 2}),
        ({"kind": "rloo"}, {}),
        ({"kind": "ppo"}, {}),
        ({"kind": "online_dpo"}, {"samples": 2}),
    ],
    ids=lambda value: value.get("kind", ""),
)
def test_online_stages_learn_over_prompts_with_and_without_pictures(sections, tmp_path, stage, rollout):
    """An adapter, the projector and the tower change; the sampler's numbers are the trainer's."""
    changes = {"stage": stage, "rollout": sections["rollout"] | rollout, "method": {"kind": "lora", "rank": 4}}
    meshtune.train(sections | changes | {"output": str(tmp_path), "train": {"steps": 6}})
    rows = [row for row in read(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    if "sampling/sampling_logp_difference/mean" in rows[0]:
        assert all(
            row["sampling/sampling_logp_difference/mean"] < 1e-5 for row in rows[:: 4 if len(rollout) > 1 else 1]
        )
    assert all(row["grad_norm"] > 0 for row in rows)
    report = (tmp_path / "report.html").read_text()
    assert "&lt;image&gt;what colour?" in report
    shown = {str(row["prompt"]) for row in read_rollouts(tmp_path)}
    assert {"image" in text for text in shown} == {True, False}, "both kinds of prompts were answered"


@pytest.mark.slow
def test_a_local_teacher_sees_what_the_student_sees(sections, tmp_path):
    """A student that is its own teacher has nothing to learn, on the data's answers and on its own."""
    for on_policy in (0.0, 1.0):
        output = tmp_path / str(on_policy)
        changes = {"stage": {"kind": "distill", "on_policy": on_policy}, "teacher": sections["model"]}
        changes |= {"rollout": {"prompts": 4, "samples": 1, "max_tokens": 6} if on_policy else None, "rewards": []}
        meshtune.train(sections | changes | {"output": str(output)})
        first = next(row for row in read(output / "metrics.jsonl") if row["kind"] == "train")
        assert abs(first["loss"]) < 1e-6
        assert first["agreement"] == 1


def test_a_teacher_that_reads_other_patches_is_refused(sections, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(sections["model"], teacher)
    settings = json.loads((teacher / "preprocessor_config.json").read_text())
    (teacher / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.4] * 3}))
    changes = {"stage": "distill", "teacher": str(teacher), "rollout": None, "rewards": []}
    with pytest.raises(UserError, match="the teacher scales or cuts pictures in another way"):
        meshtune.train(sections | changes | {"output": str(tmp_path / "run")})


def test_a_prompt_that_ends_with_a_picture_is_refused(sections, tmp_path):
    model, data = tmp_path / "model", pathlib.Path(sections["data"]["train"]).with_name("last.jsonl")
    shutil.copytree(sections["model"], model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE.replace("<|im_end|>\n", "").replace("<IMG_CONTEXT>\n", "<IMG_CONTEXT>")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>assistant\n", "")
    tokenizer.save_pretrained(model)
    rows = [{"prompt": [{"role": "user", "content": "what?<image>"}], "images": ["0.png"]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"model": str(model), "data": sections["data"] | {"train": str(data)}, "output": str(tmp_path / "run")}
    with pytest.raises(UserError, match="the prompt ends with a picture") as error:
        meshtune.train(sections | changes)
    assert "last.jsonl, record 0" in str(error.value.where)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"prompts": 2, "samples": 2, "max_tokens": 4, "environment": "a.py:A"}}, "rollout.environment"),
        ({"rewards": [{"model": "somewhere"}]}, "a reward model, which reads text only"),
        ({"stage": "rm", "rollout": None, "rewards": []}, "stage rm, which reads text only"),
        (
            {"stage": "distill", "teacher": {"path": "http://localhost:1"}, "rewards": []},
            "a teacher behind an address",
        ),
    ],
    ids=str,
)
def test_what_reads_text_only_is_refused_with_pictures(sections, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        load_recipe(sections | changes | {"output": str(tmp_path)})
