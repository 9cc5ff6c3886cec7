"""Combined adapters equal peft's add_weighted_adapter of the same adapters.

Tolerance 2e-5 on updates (B A) of size ~0.1 to 1: float32 sums in other orders; a singular value decomposition's signs
are free, so factors of those methods are not compared.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import numpy as np
import peft
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from twins import base, move_weights, our_logits, torch_logits
from typer.testing import CliRunner

from meshtune.adapters.combine import combine
from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import prepare
from meshtune.adapters.peft_format import BaseRecord, attach, load_adapter, save_adapter
from meshtune.cli.main import app
from meshtune.digests import DamagedError, check_directory, write_digests
from meshtune.errors import UserError
from meshtune.runs.combine import combine_checked
from tiny_models import torch_model

FIRST = LoraConfig(rank=4, alpha=6, targets=("q_proj", "down_proj"))
SECOND = LoraConfig(rank=4, alpha=8, targets=("q_proj", "v_proj"), rslora=True)
WIDER = LoraConfig(rank=6, alpha=3, targets=("q_proj", "up_proj"))
WEIGHTS = [0.7, -0.4]


def write_adapter(where: pathlib.Path, config: LoraConfig, seed: int, record: str = "sha256:aa") -> pathlib.Path:
    prepared = prepare(config, *base("llama3"), jax.random.key(seed))
    return save_adapter(
        where, move_weights(prepared.trainable, seed), prepared.spec, config, BaseRecord("org/base", record)
    )


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    where = tmp_path_factory.mktemp("adapters")
    configs = {"first": FIRST, "second": SECOND, "wider": WIDER}
    return {name: write_adapter(where / name, config, seed) for seed, (name, config) in enumerate(configs.items())}


def pefts(first: pathlib.Path, second: pathlib.Path, method: str, **options) -> tuple[dict[str, np.ndarray], object]:
    """(updates by module, the model) of peft's own combination."""
    model = peft.PeftModel.from_pretrained(torch_model("llama3"), str(first), "first").eval()
    model.load_adapter(str(second), "second")
    model.add_weighted_adapter(["first", "second"], WEIGHTS, "both", combination_type=method, **options)
    model.set_adapter("both")
    updates = {
        name.removeprefix("base_model.model."): module.get_delta_weight("both").detach().numpy()
        for name, module in model.named_modules()
        if "both" in getattr(module, "lora_A", {})
    }
    return updates, model


def updates_of(adapter: pathlib.Path) -> dict[str, np.ndarray]:
    fields, tensors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    names = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in tensors}
    scale = fields["lora_alpha"] / fields["r"]
    halves = {name: [tensors[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB"] for name in names}
    return {name: scale * b @ a for name, (a, b) in halves.items()}


@pytest.mark.parametrize(
    ("method", "second_name", "options"),
    [
        ("linear", "second", {}),
        ("cat", "wider", {}),
        ("svd", "wider", {}),
        pytest.param("svd", "second", {"rank": 3}, marks=pytest.mark.slow),
        ("ties", "second", {"density": 0.6}),
        pytest.param("ties", "second", {"density": 0.5, "majority": "frequency"}, marks=pytest.mark.slow),
        pytest.param("magnitude_prune", "second", {"density": 0.3}, marks=pytest.mark.slow),
        ("ties_svd", "wider", {"density": 0.5}),
        pytest.param("dare_linear", "second", {"density": 1.0}, marks=pytest.mark.slow),
    ],
)
def test_a_combination_is_pefts(method, second_name, options, adapters, tmp_path):
    # peft keeps use_rslora of the first adapter alone, and none of ours has the first's: its scale is then 1, as ours.
    first, second = adapters["first"], adapters[second_name]
    names: dict[str, str] = {"rank": "svd_rank", "majority": "majority_sign_method"}
    expected, model = pefts(first, second, method, **{names.get(key, key): value for key, value in options.items()})
    done = combine([first, second], tmp_path / "both", WEIGHTS, method, **options)
    actual = updates_of(tmp_path / "both")
    assert actual.keys() == expected.keys()
    assert done.modules == len(actual)
    for name, update in expected.items():
        assert np.abs(update).max() > 1e-3
        np.testing.assert_allclose(actual[name], update, atol=2e-5, rtol=0, err_msg=name)
    spec, params = base("llama3")
    spec, params = attach(params, spec, load_adapter(tmp_path / "both", spec))
    assert np.abs(our_logits(params, spec) - torch_logits(model)).max() < 1e-3
    again = peft.PeftModel.from_pretrained(torch_model("llama3"), str(tmp_path / "both")).eval()
    assert np.abs(torch_logits(again) - torch_logits(model)).max() < 1e-3


def test_dare_keeps_the_expected_update(adapters, tmp_path):
    """The mean over 300 seeds of what dare keeps is the sum: within five standard errors of each number."""
    from meshtune.adapters.combine import Factors, combine_factors

    rng = np.random.default_rng(0)
    parts = [Factors(rng.normal(size=(2, 5)), rng.normal(size=(4, 2)), 1.0) for _ in range(2)]
    samples = [
        combine_factors(parts, [0.5, 0.5], "dare_linear", 2, density=0.4, draw=np.random.default_rng(seed))[0]
        for seed in range(300)
    ]
    undropped = combine_factors(parts, [0.5, 0.5], "linear", 2)[0]
    error = np.std(samples, axis=0) / np.sqrt(len(samples))
    assert (np.abs(np.mean(samples, axis=0) - undropped) < 5 * error).all()


def test_the_result_records_what_it_came_from(adapters, tmp_path):
    paths = [str(adapters["first"]), str(adapters["wider"])]
    ran = CliRunner().invoke(
        app, ["adapters", "combine", *paths, "--weights", "0.5,2", "--method", "cat", "--to", str(tmp_path / "c")]
    )
    assert ran.exit_code == 0, ran.output
    assert "rank 10" in ran.output
    with safe_open(tmp_path / "c/adapter_model.safetensors", framework="np") as file:
        record = json.loads(file.metadata()["meshtune"])
    assert record["base"] == {"path": "org/base", "hash": "sha256:aa"}
    assert record["combined"]["method"] == "cat"
    assert [(part["path"], part["weight"]) for part in record["combined"]["of"]] == list(
        zip(paths, [0.5, 2.0], strict=True)
    )
    assert all(part["hash"].startswith("sha256:") for part in record["combined"]["of"])


def test_a_damaged_adapter_is_not_combined_and_the_result_has_digests(adapters, tmp_path):
    first = pathlib.Path(shutil.copytree(adapters["first"], tmp_path / "first"))
    write_digests(first)
    combined = combine_checked([first, adapters["second"]], tmp_path / "combined", WEIGHTS)
    assert check_directory(combined.path, fix="")
    content = bytearray((first / "adapter_model.safetensors").read_bytes())
    content[-1] ^= 1
    (first / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(DamagedError, match=r"adapter_model\.safetensors is damaged: its contents are not those"):
        combine_checked([first, adapters["second"]], tmp_path / "refused", WEIGHTS)
    assert not (tmp_path / "refused").exists()


def test_what_cannot_be_combined_is_refused(adapters, tmp_path):
    first, second, wider = adapters["first"], adapters["second"], adapters["wider"]
    to = tmp_path / "x"
    with pytest.raises(UserError, match=r"(?s)ranks 4, 6.*cat"):
        combine([first, wider], to, WEIGHTS, "linear")
    with pytest.raises(UserError, match=r"(?s)no method 'tie'.*ties"):
        combine([first, second], to, WEIGHTS, "tie")
    with pytest.raises(UserError, match="2 adapters and 1 weights"):
        combine([first, second], to, [1.0])
    with pytest.raises(UserError, match="density is None"):
        combine([first, second], to, WEIGHTS, "ties")
    with pytest.raises(UserError, match="reads no density"):
        combine([first, second], to, WEIGHTS, "cat", density=0.5)
    with pytest.raises(UserError, match="would replace one of the adapters"):
        combine([first, second], first, WEIGHTS)
    of_another_base = write_adapter(tmp_path / "other", FIRST, 9, "sha256:bb")
    with pytest.raises(UserError, match=r"different bases: org/base \(sha256:aa\) and org/base \(sha256:bb\)"):
        combine([first, of_another_base], to, WEIGHTS)
    combine([first, of_another_base], to, WEIGHTS, any_base=True)
    full = write_adapter(tmp_path / "full", LoraConfig(rank=4, targets=("q_proj",), train_modules=("norm",)), 3)
    with pytest.raises(UserError, match=r"model\.norm\.weight.*trained in full"):
        combine([first, full], tmp_path / "y", WEIGHTS)
