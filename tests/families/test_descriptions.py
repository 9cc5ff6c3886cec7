"""`meshtune families` tells the truth: each method and mesh axis that is listed is possible, each limit is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from families.case import Case
from families.cases import FIRST
from meshtune.adapters.config import ExpandConfig, FreezeConfig, FullConfig, LoraConfig
from meshtune.adapters.method import abstract
from meshtune.adapters.registry import ADAPTERS
from meshtune.adapters.targets import modules
from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families import description, model_spec
from meshtune.families.expansion import expanded_config, group_layers, silent_modules
from meshtune.families.family import Family
from meshtune.mesh.config import AXES, MeshConfig
from meshtune.model.gather import layout_for
from meshtune.quantize.config import QuantizeConfig

KNOWN = {*AXES, *ADAPTERS, "full", "freeze", "expand"}
every_family = pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)


def describe_case(case: Case) -> Family:
    return description(case.text or case.model_type)


def mixers(case: Case) -> tuple[str, ...]:
    """The linear layers of the mixers."""
    spec = model_spec(case.torch_config().to_dict())
    names = {kind.mixer.name for kind in spec.layer_kinds if kind.mixer is not None}
    among = modules(spec).values()
    return tuple(m.name for m in among if m.role == "matrix" and m.in_peft and m.site.split("/")[0] in names)


def plan(method: str, case: Case) -> None:
    """Makes the abstract trees of a method. Raises UserError for one that is not possible."""
    config = case.torch_config().to_dict()
    if method == "expand":
        deeper = group_layers(model_spec(expanded_config(config, 2)), 2)
        abstract(ExpandConfig(blocks=2), deeper)
        silent_modules(deeper, 2)
    elif method in ADAPTERS:
        quantize = QuantizeConfig("nf4", 8, double=False) if method == "loftq" else None
        targets = mixers(case) if describe_case(case).experts else case.targets
        if method == "oft":
            lora = LoraConfig(targets=targets, adapter="oft", oft_block_size=4)
        else:
            lora = LoraConfig(targets=targets, adapter=method, rank=4)
        abstract(lora, model_spec(config), quantize=quantize)
    else:
        abstract({"full": FullConfig(), "freeze": FreezeConfig(last_layers=1)}[method], model_spec(config))


@every_family
def test_methods_are_possible_but_for_limits(case: Case):
    limits = describe_case(case).refusals
    for method in KNOWN - set(AXES):
        if method in limits:
            with pytest.raises(UserError):
                plan(method, case)
        else:
            plan(method, case)


@every_family
def test_mesh_axes_are_possible_but_for_limits(case: Case):
    """On meshes of two devices, which are one device here: a layout depends on sizes only."""
    family = describe_case(case)
    spec = model_spec(case.changed(vocab_size=case.vocab_on_mesh).torch_config().to_dict())
    for axis in AXES:
        sizes = MeshConfig(**{axis: 2}).sizes
        mesh = Mesh(np.full(tuple(sizes.values()), jax.devices()[0]), AXES)
        if axis in family.refusals or (axis == "ep" and not family.experts):
            with pytest.raises(UserError):
                layout_for(mesh, spec)
        else:
            layout_for(mesh, spec)


@every_family
def test_limits_are_of_methods_and_axes(case: Case):
    limits = describe_case(case).refusals
    assert limits.keys() <= KNOWN
    assert all(limits.values()), "a limit has a reason"


def test_all_linear_leaves_out_what_peft_refuses_and_an_explicit_target_says_so():
    spec = model_spec(next(case for case in FIRST if case.name == "mamba2").torch_config().to_dict())
    targets = {path.split("/", 2)[2] for path in flatten(abstract(LoraConfig(), spec).trainable)}
    assert targets == {"mamba/in/adapter"}
    with pytest.raises(UserError, match=r"peft refuses adapters on .*out_proj"):
        abstract(LoraConfig(targets=("out_proj",)), spec)
