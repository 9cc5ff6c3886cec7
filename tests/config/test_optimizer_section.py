"""Optimizers of a recipe: all there are, and combinations that cannot be are refused with what can."""

from __future__ import annotations

from typing import get_args

import pytest

from meshtune.config.load import load_recipe
from meshtune.config.section import section_fields
from meshtune.config.sections import NOT_IN_BACKWARD, READERS
from meshtune.errors import UserError
from meshtune.optim.build import OPTIMIZERS
from meshtune.optim.config import OptimizerOptions

RECIPE = {"model": "m", "data": "a.json", "output": "o", "method": "full"}


def recipe(method="full", train=None, compute=None, stage="sft", **optimizer):
    sections = {"train": train or {}, "compute": compute or {}, "stage": stage}
    return load_recipe({**RECIPE, "method": method, "optimizer": optimizer, **sections})


def test_a_recipe_may_name_every_optimizer_there_is_and_no_other():
    names = get_args(section_fields(OptimizerOptions)["name"].annotation)
    assert set(names) == set(OPTIMIZERS)
    assert {name for readers in READERS.values() for name in readers} <= set(names)
    assert {name for name, kind in OPTIMIZERS.items() if kind.by_parameter is None} == set(NOT_IN_BACKWARD)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_recipe_of_every_optimizer_reads_back_as_itself(name):
    schedule = {"schedule": "constant"} if name == "schedule_free" else {}
    loaded = recipe(name=name, **schedule)
    assert load_recipe(loaded.model_dump(mode="json")) == loaded


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"in_backward": True}, "max_grad_norm clips by the norm of all gradients.*set max_grad_norm: null.*adafactor"),
        (
            {"in_backward": True, "max_grad_norm": None, "train": {"batch_size": 8, "micro_batch": 4}},
            r"before the next one's could be added.*leave train.micro_batch out \(all 8 rows.*galore or badam",
        ),
        ({"in_backward": True, "max_grad_norm": None, "train": {"micro_batch": "auto"}}, "leave train.micro_batch out"),
        (
            {"in_backward": True, "max_grad_norm": None, "name": "prodigy"},
            "estimates its rate from the gradients of all.*adamw8",
        ),
        ({"in_backward": True, "max_grad_norm": None, "name": "badam"}, "gradient of one layer only"),
        (
            {"in_backward": True, "max_grad_norm": None, "method": "lora"},
            "adapters have little.*method: full or freeze",
        ),
        ({"name": "badam", "method": "lora"}, "adapters have little of either.*method: full or freeze"),
        ({"name": "galore", "method": "lora"}, "low rank already.*method: full or freeze"),
        ({"name": "apollo", "method": "lora"}, "low rank already.*method: full or freeze"),
        ({"name": "badam", "compute": {"remat": "selective"}}, "compute.remat: full or auto, not selective"),
        ({"name": "badam", "compute": {"scan_layers": False}}, "leave compute.scan_layers out"),
        (
            {"name": "schedule_free"},
            "instead of decaying the learning rate, and schedule is cosine.*schedule: constant",
        ),
        ({"name": "schedule_free", "schedule": "constant", "beta1": 0}, "beta1 between average and iterate.*above 0"),
        ({"name": "sophia", "stage": "dpo"}, "predictions of single tokens.*stage dpo.*use adamw"),
        ({"rank": 8}, "rank is read by galore and apollo alone, and adamw was chosen"),
        ({"name": "galore", "scaling": "tensor"}, "scaling is read by apollo alone, and galore was chosen"),
        ({"name": "muon", "switch_every": 2}, "switch_every is read by badam alone, and muon was chosen"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(fields, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        recipe(**fields)


def test_what_can_be_is_not_refused():
    assert recipe(name="sgd", in_backward=True, max_grad_norm=None).optimizer.layerwise
    assert recipe(name="badam", train={"batch_size": 8, "micro_batch": 2}).optimizer.layerwise
    assert not recipe(name="galore", train={"batch_size": 8, "micro_batch": 2}).optimizer.layerwise
