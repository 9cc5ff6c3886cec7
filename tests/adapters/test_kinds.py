"""DoRA, PiSSA, OFT and VeRA are peft's: forward, backward, on disk both ways, and merged.

Tolerance 1e-4 on float32 logits of size ~1-10, and of the largest entry of each gradient: orders of summation.
"""

from __future__ import annotations

import copy
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import safetensors
import torch
from kinds import EVERYWHERE, KINDS, config_of, in_peft, made_by_peft, move_model
from peft.tuners.vera.model import _kaiming_init
from safetensors.numpy import save_file
from twins import COMPUTE, TOKENS, base, forward, our_logits, torch_logits, trained_logits

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.method import SHARED, PreparedModel, abstract, prepare
from meshtune.adapters.peft_config import read_config
from meshtune.adapters.peft_format import BaseRecord, attach, load_adapter, save_adapter
from meshtune.adapters.peft_tensors import collect
from meshtune.adapters.registry import ADAPTERS
from meshtune.adapters.vera import VeRA
from meshtune.adapters.verify import CONVERTED, export_adapter, verify_adapter
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import merge
from meshtune.errors import UserError
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.load import load_params, load_spec
from tiny_models import torch_model

BASE = BaseRecord("some/base", "sha256:0")


def prepare_kind(kind: str, name: str = "llama_bias", **fields) -> PreparedModel:
    return prepare(config_of(kind, **fields), *base(name), jax.random.key(3))


def fast(*quick: str) -> list:
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_beside_a_real_model_passes_its_own_check(kind: str, smollm2, tmp_path: pathlib.Path):
    """Logits of SmolLM2 on random tokens magnify rounding; they magnify a defect of the written files more: numbers
    that are a tenth too large fail the check."""
    spec, _ = load_spec(smollm2)
    config = config_of(kind)
    model = move_model(prepare(config, spec, load_params(smollm2, spec), jax.random.key(3)), KINDS[kind][2])
    path = export_adapter(tmp_path / "adapter", model, config, BASE)
    with safetensors.safe_open(path / "adapter_model.safetensors", "np") as file:
        tensors = {name: 1.1 * file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file(tensors, path / "adapter_model.safetensors", metadata)
    with pytest.raises(UserError, match="differs from what was trained"):
        verify_adapter(path, model, tolerance=CONVERTED)


@pytest.mark.parametrize("kind", fast("dora", "vera"))
def test_a_kind_is_pefts_forward_backward_on_disk_and_merged(kind: str, tmp_path: pathlib.Path):
    config = config_of(kind, targets=EVERYWHERE)
    adapted_model = prepare_kind(kind, targets=EVERYWHERE)
    plain = torch_logits(torch_model("llama_bias"))
    assert np.abs(trained_logits(adapted_model) - plain).max() < 1e-4  # before training the model is the base
    adapted_model = move_model(adapted_model, KINDS[kind][2])
    expected = trained_logits(adapted_model)
    assert np.abs(expected - plain).max() > 0.1  # the adapter does something

    saved = export_adapter(tmp_path / "adapter", adapted_model, config, BASE)  # read again, and compared
    theirs = in_peft(torch_model("llama_bias"), saved, trainable=True)
    # PEFT's own form of PiSSA: two decompositions in float32, each off by rounding over the gap of singular values.
    near = 5e-4 if kind == "pissa" else 1e-4
    assert np.abs(torch_logits(theirs) - expected).max() < near

    tokens = torch.from_numpy(TOKENS).long()
    theirs(tokens, labels=tokens).loss.backward()

    def loss(trainable):
        z = forward(merge(trainable, adapted_model.frozen), adapted_model.spec, COMPUTE, TOKENS)
        return -jnp.take_along_axis(jax.nn.log_softmax(z[:, :-1]), TOKENS[:, 1:, None], -1).mean()

    written = collect(
        jax.jit(jax.grad(loss))(adapted_model.trainable), adapted_model.spec, config, adapted_model.frozen.get(SHARED)
    )
    ours = {t.name: np.asarray(t.parts[0].leaf[t.parts[0].index]) for t in written.tensors}
    compared = 0
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            stored_name = name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")
            want = parameter.grad.numpy()
            assert np.abs(ours[stored_name] - want).max() < near * np.abs(want).max() + 1e-7, name
            compared += 1
    assert compared == len(ours) - len(ADAPTERS[kind].PEFT_SHARED)

    spec = adapted_model.spec
    merged_tree = merge(*(jax.tree.map(jnp.copy, tree) for tree in (adapted_model.trainable, adapted_model.frozen)))
    assert np.abs(our_logits(merge_adapters(merged_tree), spec) - expected).max() < 1e-4


@pytest.mark.parametrize("kind", fast("oft", "pissa"))
def test_what_peft_writes_loads_here(kind: str, tmp_path: pathlib.Path):
    theirs = copy.deepcopy(KINDS[kind][1])
    theirs.task_type, theirs.target_modules = "CAUSAL_LM", {"q_proj", "o_proj", "up_proj", "down_proj"}
    expected = made_by_peft(torch_model("llama3"), theirs, tmp_path, KINDS[kind][2])
    assert np.abs(expected - torch_logits(torch_model("llama3"))).max() > 0.1
    # PEFT's own form of PiSSA: two decompositions in float32, each off by rounding over the gap of singular values.
    near = 5e-4 if kind == "pissa" else 1e-4
    spec, params = base("llama3")
    loaded = load_adapter(tmp_path, spec)
    assert loaded.config.adapter == kind
    new, params = attach(params, spec, loaded)
    assert np.abs(our_logits(params, new) - expected).max() < near
    shared = loaded.frozen.get(SHARED)
    save_adapter(tmp_path / "again", loaded.trainable, loaded.spec, loaded.config, loaded.base, shared=shared)
    assert np.abs(torch_logits(in_peft(torch_model("llama3"), tmp_path / "again")) - expected).max() < near
    assert np.abs(our_logits(merge_adapters(params), new) - expected).max() < near


@pytest.mark.parametrize("rslora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pissa_is_a_plain_lora_of_twice_the_rank_as_peft_converts_it(rslora: bool, tmp_path: pathlib.Path):
    """The base is unchanged. Tolerance as that of PEFT's own form."""
    config = config_of("pissa", pissa_convert=True, rslora=rslora, targets=("q_proj", "down_proj"))
    adapted_model = move_model(prepare(config, *base("llama3"), jax.random.key(0)), 0.1)
    ours = export_adapter(tmp_path / "ours", adapted_model, config, BASE)
    loaded = load_adapter(ours, adapted_model.spec)
    assert (loaded.config.adapter, loaded.config.rank, loaded.config.rslora) == ("lora", 8, rslora)
    assert np.abs(torch_logits(in_peft(torch_model("llama3"), ours)) - trained_logits(adapted_model)).max() < 1e-4

    theirs = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=rslora, init_lora_weights="pissa")
    theirs.target_modules = {"q_proj", "down_proj"}
    start = str(tmp_path / "start")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(torch_model("llama3"), theirs)
        theirs.init_lora_weights = True
        model.save_pretrained(start)
        theirs.init_lora_weights = "pissa"
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        expected = torch_logits(model.eval())
        model.save_pretrained(str(tmp_path / "theirs"), path_initial_model_for_weight_conversion=start)
    spec, params = base("llama3")
    loaded = load_adapter(tmp_path / "theirs", spec)
    assert (loaded.config.adapter, loaded.config.rank, loaded.config.scale()) == ("lora", 8, made_scale(config))
    new, params = attach(params, spec, loaded)
    assert np.abs(our_logits(params, new) - expected).max() < 5e-4


def made_scale(config: LoraConfig) -> float:
    return pytest.approx(config.scale())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "oft", "vera"])
def test_over_nf4_it_is_pefts_over_the_same_numbers(kind: str, tmp_path: pathlib.Path):
    """peft has the dequantised weights, as it would make them on a GPU with bitsandbytes."""
    config = config_of(kind, targets=("q_proj", "down_proj"))
    spec, params = base("llama3")
    model, coded = torch_model("llama3"), QuantizeConfig("nf4", 8)
    layers = params["layers"]["0.0"]
    for part, name in (("attn", "q"), ("mlp", "down")):
        layers[part][name]["weight"] = quantised = QuantisedWeight.quantise(layers[part][name]["weight"], coded)
        numbers = torch.from_numpy(np.array(quantised.dequantise("float32")))
        for layer, weight in zip(model.model.layers, numbers, strict=True):
            torch_layer = layer.self_attn.q_proj if name == "q" else layer.mlp.down_proj
            torch_layer.weight.data = weight
    adapted_model = prepare(config, spec, params, jax.random.key(0))
    assert np.abs(trained_logits(adapted_model) - torch_logits(model)).max() < 1e-4
    adapted_model = move_model(adapted_model, KINDS[kind][2])
    shared = adapted_model.frozen.get(SHARED)
    save_adapter(tmp_path / "a", adapted_model.trainable, adapted_model.spec, config, BASE, shared=shared)
    assert np.abs(torch_logits(in_peft(model, tmp_path / "a")) - trained_logits(adapted_model)).max() < 1e-4


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
OFT = {"peft_type": "OFT", "r": 0, "oft_block_size": 8, "target_modules": ["q_proj"], "peft_version": "0.21.0"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (LORA | {"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.*changes the base's weights"),
        (LORA | {"init_lora_weights": "loftq"}, "loftq.*changes the base's weights"),
        (LORA | {"init_lora_weights": "pissa", "use_dora": True}, "pissa.*changes the base's weights"),
        (OFT | {"coft": True}, "coft is True"),
        (OFT | {"block_share": True}, "block_share is True"),
        (OFT | {"use_cayley_neumann": True, "peft_version": "0.17.1"}, "form that PEFT gave up in 0.18"),
        ({"peft_type": "OFT", "r": 8, "target_modules": ["q_proj"]}, "form that PEFT gave up in 0.18"),
        ({"peft_type": "VERA", "target_modules": ["q_proj"]}, "r is missing"),
    ],
)
def test_what_is_not_read_is_named(fields: dict, message: str):
    with pytest.raises(UserError, match=message):
        read_config(fields, "adapter_config.json")


def test_projections_that_were_left_out_are_drawn_again(tmp_path: pathlib.Path):
    """Bit for bit: torch's generator, its Mersenne twister and its 24 bits."""
    drawn = VeRA.shared([ArraySpec((300, 70), "float32", ("ffn", "embed"))], config_of("vera", rank=16)).start()
    generator = torch.Generator(device="cpu").manual_seed(3)
    assert np.array_equal(drawn.a, _kaiming_init((16, 70), generator).numpy())
    assert np.array_equal(drawn.b, _kaiming_init((300, 16), generator).numpy())
    theirs = peft.VeraConfig(r=8, projection_prng_key=3, save_projection=False, target_modules=["q_proj", "up_proj"])
    expected = made_by_peft(torch_model("llama3"), theirs, tmp_path, 0.3)  # with peft's own warning
    spec, params = base("llama3")
    new, params = attach(params, spec, load_adapter(tmp_path, spec))
    assert np.abs(our_logits(params, new) - expected).max() < 1e-4


def test_sizes_that_cannot_be_are_refused():
    for kind in KINDS:
        size = {"oft_block_size": 5} if kind == "oft" else {"rank": 17}
        with pytest.raises(UserError, match="do not divide" if kind == "oft" else "rank 17 is above.*k_proj"):
            abstract(config_of(kind, **size), base("llama3")[0])
