"""Runs that read pictures, from files to a result that transformers and peft open."""

from __future__ import annotations

import base64
import io
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from pictures_to_see import write_model, write_records
from PIL import Image
from safetensors.numpy import load_file
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

import command
import meshtune
from meshtune.errors import UserError
from meshtune.generate.pictures import insert_pictures, load_picture
from meshtune.generate.target_log_probs import TargetText
from meshtune.train.report.metrics_log import read


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> dict[str, object]:
    """The sections of a recipe for a tiny model and its pictures."""
    folder = tmp_path_factory.mktemp("seeing")
    data = write_records(folder / "data")
    return {
        "model": str(write_model(folder / "model")),
        "data": {"train": str(data), "max_length": 64},
        "vision": {"train": ["projector"]},
        "method": {"kind": "lora", "rank": 4},
        "train": {"steps": 6, "batch_size": 4},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
        "checkpoint": {"every": 3},
    }


def losses(output: pathlib.Path) -> list[float]:
    return [row["loss"] for row in read(output / "metrics.jsonl") if row["kind"] == "train"]


def test_lora_and_a_projector_learn_and_open_in_peft(seeing, tmp_path):
    whole = tmp_path / "whole"
    meshtune.train(seeing | {"output": str(whole)})
    values = losses(whole)
    assert values[-1] < 0.95 * values[0]
    written = load_file(whole / "adapter" / "adapter_model.safetensors")
    assert any("multi_modal_projector" in name for name in written)
    assert not any("vision_tower" in name for name in written)
    model = transformers.AutoModelForImageTextToText.from_pretrained(seeing["model"])
    loaded = peft.PeftModel.from_pretrained(model, str(whole / "adapter"))
    trained = dict(loaded.named_parameters())
    for name, array in written.items():
        if "multi_modal_projector" in name:
            (theirs,) = [
                value
                for other, value in trained.items()
                if "modules_to_save" in other
                and other.replace(".modules_to_save.default", "").endswith(name.removeprefix("base_model.model."))
            ]
            np.testing.assert_array_equal(theirs.detach().numpy(), array)


def test_every_shape_of_batch_is_compiled_before_the_first_update(seeing, tmp_path):
    """Batches of four pictures, of one, and of none, each a third: the one with the most patches first. JAX says what
    is compiled, and the log of updates when."""
    folder, output, rows = pathlib.Path(seeing["data"]["train"]).parent, tmp_path / "run", []
    for number in range(12):
        names = [f"{place}.png" for place in range((4, 1, 0)[number % 3])]
        turns = [
            {"role": "user", "content": "<image>" * len(names) + "say red"},
            {"role": "assistant", "content": "red"},
        ]
        rows.append({"messages": turns, "images": names})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    compiled: list[tuple[str, int]] = []

    def note(event: str, seconds: float, fun_name: str = "", **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append((fun_name, len(losses(output)) if (output / "metrics.jsonl").is_file() else 0))

    sections = {"data": {"train": str(tmp_path / "data.jsonl"), "max_length": 96, "packing": False}}
    sections |= {"vision": {"media_dir": str(folder)}, "train": {"epochs": 1, "batch_size": 1}, "checkpoint": {}}
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        meshtune.train(seeing | sections | {"output": str(output)})
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert compiled.count(("jit(adjusted)", 0)) == 3, "the step, which adjusts buffers last"
    assert not [name for name, done in compiled if 0 < done < 12]
    console = (output / "console.log").read_text()
    assert re.findall(r"compiled the training step in [\d.]+ s(?: for (\d+) patches)?", console) == ["64", "32", ""]


@pytest.mark.slow
def test_micro_batches_of_pictures_change_nothing(seeing, tmp_path):
    meshtune.train(seeing | {"output": str(tmp_path / "whole")})
    meshtune.train(seeing | {"output": str(tmp_path / "parts"), "train": seeing["train"] | {"micro_batch": 2}})
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-4)


@pytest.mark.slow  # generation compiles for a minute
def test_an_export_of_adapters_answers_in_transformers_as_here(seeing, tmp_path):
    """Merged in float32: 1e-4 of log-probabilities, since base and adapter are added before the product, not after."""
    run, export = tmp_path / "run", tmp_path / "export"
    meshtune.train(seeing | {"output": str(run)})
    done = command.run("export", run, "--to", export, "--merge", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    here = meshtune.load(run, dtype="float32")
    there = transformers.AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    processor = GotOcr2ImageProcessorPil.from_pretrained(export)
    assert here.picture_reader is not None
    files = [pathlib.Path(seeing["data"]["train"]).parent / f"{number}.png" for number in (0, 1, 2)]
    content = [[{"type": "image", "image": str(file)}, {"type": "text", "text": "what colour?"}] for file in files]
    answers = here.generate([[{"role": "user", "content": parts}] for parts in content], max_tokens=5, temperature=0)
    for file, answer in zip(files, answers, strict=True):
        text = "<|im_start|>user\n<IMG_CONTEXT>\nwhat colour?<|im_end|>\n<|im_start|>assistant\n"
        picture = load_picture(here.picture_reader, str(file), "test")
        prompt = insert_pictures(here.picture_reader, tokenizer(text, add_special_tokens=False).input_ids, [picture])
        (ours,) = here.target_log_probs([TargetText(tuple(prompt.ids), 1, prompt.pictures)])
        pixels = np.asarray(processor([Image.open(file).convert("RGB")])["pixel_values"])
        inputs = {"input_ids": torch.tensor([prompt.ids]), "pixel_values": torch.tensor(pixels)}
        with torch.no_grad():
            logits = there(**inputs).logits[0, :-1].log_softmax(-1)
            end = tokenizer.convert_tokens_to_ids("<|im_end|>")
            generated = there.generate(**inputs, max_new_tokens=5, do_sample=False, eos_token_id=end)
        theirs = logits[range(len(prompt.ids) - 1), prompt.ids[1:]].numpy()
        np.testing.assert_allclose(ours.log_probabilities, theirs, atol=1e-4)
        new = generated[0, len(prompt.ids) :]
        assert tokenizer.decode(new, skip_special_tokens=True).strip() == str(answer).strip()


@pytest.mark.slow
def test_full_tuning_of_everything_exports_a_model_that_transformers_opens(seeing, tmp_path):
    output = tmp_path / "run"
    folder = pathlib.Path(seeing["data"]["train"]).parent
    prompts = [
        [{"type": "image", "image": str(folder / name)}, {"type": "text", "text": "<b>colour?"}]
        for name in ("0.png", "1.png")
    ]
    sections = {"method": "full", "vision": {"train": ["projector", "tower"]}, "output": str(output)}
    meshtune.train(seeing | sections | {"sample": {"prompts": prompts, "max_tokens": 2}})
    assert losses(output)[-1] < losses(output)[0]
    pictures = [row["pictures"] for row in read(output / "samples.jsonl")]
    report = (output / "report.html").read_text()
    for (address,), name in zip(pictures[:2], ("0.png", "1.png"), strict=True):
        small = Image.open(io.BytesIO(base64.b64decode(address.removeprefix("data:image/jpeg;base64,"))))
        assert small.size == Image.open(folder / name).size, "smaller than a thumbnail already"
        assert report.count(address) == 1, "an answer is under its picture, the question is the same"
    assert pictures == 2 * pictures[:2], "before the first update and after the last"
    assert "<b>colour?" not in report
    before, after = (
        load_file(pathlib.Path(path) / "model.safetensors") for path in (seeing["model"], output / "model")
    )
    assert before.keys() == after.keys()
    assert all(not np.array_equal(before[name], after[name]) for name in before)
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(output / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    answer = model.generate(torch.ones((1, 3), dtype=torch.long), max_new_tokens=2)
    assert answer.shape[0] == 1


def test_a_frozen_language_model_stays_what_it_was(seeing, tmp_path):
    output = tmp_path / "run"
    sections = {"method": "full", "vision": {"train": ["projector"], "freeze_language": True}, "output": str(output)}
    meshtune.train(seeing | sections)
    before, after = (
        load_file(pathlib.Path(path) / "model.safetensors") for path in (seeing["model"], output / "model")
    )
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if "projector" in name}


def test_pairs_with_pictures_are_learned(seeing, tmp_path):
    data = write_records(tmp_path / "pairs", pairs=True)
    sections = {"data": {"train": str(data), "max_length": 64}, "stage": "dpo", "output": str(tmp_path / "run")}
    meshtune.train(seeing | sections)
    values = losses(tmp_path / "run")
    assert values[0] == pytest.approx(np.log(2), abs=1e-5), "the reference reads the same pictures"
    assert values[-1] < 0.9 * np.log(2)
    console = (tmp_path / "run" / "console.log").read_text()
    assert "cached (auto: vision.train changes the projector" in " ".join(console.split())


def test_another_model_that_sees_is_the_reference_of_pairs(seeing, tmp_path):
    """A copy of the model is no reference to be above or below; one that scales pictures otherwise is refused."""
    data = write_records(tmp_path / "pairs", pairs=True)
    other = pathlib.Path(shutil.copytree(seeing["model"], tmp_path / "other"))
    sections = {"data": {"train": str(data), "max_length": 64}, "stage": {"kind": "dpo", "reference": str(other)}}
    sections |= {"train": {"steps": 1, "batch_size": 4}, "checkpoint": {}, "output": str(tmp_path / "run")}
    meshtune.train(seeing | sections)
    assert losses(tmp_path / "run")[0] == pytest.approx(np.log(2), abs=1e-5)
    file = other / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.4] * 3}))
    with pytest.raises(UserError, match="the reference scales or cuts pictures in another way"):
        meshtune.train(seeing | sections | {"output": str(tmp_path / "again")})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["mesh={cp: 2}"], "a picture is on one device"),
        (
            ["method=full", "optimizer={in_backward: true, max_grad_norm: null}", "vision={freeze_language: true}"],
            "vision.freeze_language freezes",
        ),
        (["vision={train: [eyes]}"], "vision.train"),
        (["vision=null"], "vision"),
    ],
)
def test_what_pictures_do_not_go_with_is_named(seeing, tmp_path, changes, problem):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(seeing | {"output": str(tmp_path / "run")}))
    done = command.run("train", recipe, *changes)
    assert done.returncode != 0
    assert problem in done.stderr, done.stderr


def test_a_text_model_refuses_the_section(seeing, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(seeing | {"output": str(tmp_path / "run")}))
    done = command.run("train", recipe, f"model={meshtune.quickstart.MODEL}")
    assert done.returncode != 0
    assert "vision" in done.stderr
