"""Finding compilers, describing devices to them, and the process in which they run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import re
import time

import pytest

from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import Device, find_target, known_devices
from meshtune.errors import UserError
from meshtune.plan.compilers import MissingCompiler, compile_recipe, find_compiler
from meshtune.plan.compilers.compile import _read
from meshtune.plan.compilers.find import Compiler, require_compiler
from meshtune.plan.compilers.process import child_env, run
from meshtune.plan.compilers.topology import refused_bytes, slice_shape, target_config, tpu_slice

JAXLIB = importlib.metadata.version("jaxlib")
FOLDER = pathlib.Path(__file__).parent


def packages(folder: pathlib.Path, *names: str, version: str = JAXLIB) -> None:
    """The metadata that `pip --target` writes for packages."""
    for name in names:
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def cuda(folder: pathlib.Path, version: str = JAXLIB) -> pathlib.Path:
    packages(folder, "jax-cuda12-plugin", "jax-cuda12-pjrt", version=version)
    (folder / "jax_plugins/xla_cuda12").mkdir(parents=True)
    return folder


def ptxas(folder: pathlib.Path) -> None:
    (folder / "nvidia/cuda_nvcc/bin").mkdir(parents=True)
    (folder / "nvidia/cuda_nvcc/bin/ptxas").touch()


def find(platform: str, folder: pathlib.Path) -> Compiler | MissingCompiler:
    return find_compiler(
        platform, {"MESHTUNE_COMPILERS": str(folder), "HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    )


def test_a_missing_compiler_comes_with_the_way_to_install_it(tmp_path):
    for platform in ("cuda", "rocm", "tpu"):
        answer = find(platform, tmp_path)
        assert isinstance(answer, MissingCompiler)
        assert "is not installed" in answer.reason
        assert f"meshtune doctor --install {platform}" in answer.fix
        assert f".[plan-{platform}]" in answer.fix


def test_the_extras_in_the_advice_exist():
    extras = importlib.metadata.metadata("meshtune").get_all("Provides-Extra") or []
    pyproject = (FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    for platform in ("cuda", "rocm", "tpu"):
        assert f"plan-{platform}" in extras or f"\nplan-{platform} = " in pyproject


def test_a_plugin_of_another_version_of_jax_is_refused(tmp_path):
    ptxas(cuda(tmp_path / "cuda", "0.5.0"))
    answer = find("cuda", tmp_path)
    assert isinstance(answer, MissingCompiler)
    assert f"jax-cuda12-pjrt 0.5.0 cannot work with jaxlib {JAXLIB}" in answer.reason


def test_a_compiler_without_its_assembler_is_missing(tmp_path):
    cuda(tmp_path / "cuda")
    answer = find("cuda", tmp_path)
    if (pathlib.Path("/usr/local/cuda/bin/ptxas")).is_file():
        pytest.skip("CUDA is installed here")
    assert isinstance(answer, MissingCompiler)
    assert "ptxas" in answer.reason


def test_a_compiler_in_a_separate_folder_is_found_with_its_environment(tmp_path):
    ptxas(cuda(tmp_path / "cuda"))
    answer = find("cuda", tmp_path)
    assert isinstance(answer, Compiler)
    assert answer.folder == tmp_path / "cuda"
    assert answer.packages["jax-cuda12-plugin"] == JAXLIB
    assert answer.env["CUDA_ROOT"] == str(tmp_path / "cuda/nvidia/cuda_nvcc")


def test_a_missing_compiler_is_one_message(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHTUNE_COMPILERS", str(tmp_path))
    with pytest.raises(UserError, match="XLA's compiler for TPUs") as caught:
        require_compiler("tpu")
    assert "plan-tpu" in (caught.value.fix or "")


def test_a_compiler_process_starts_no_backend_but_the_cpu(tmp_path):
    target = find_target("8xH100", {})
    compiler = Compiler("cuda", {}, tmp_path / "cuda", {"CUDA_ROOT": "/x"})
    outside = {
        "PATH": "/bin",
        "JAX_PLATFORMS": "cuda",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_dump_to=/tmp/x",
        "PYTHONPATH": "/mine",
        "JAX_COMPILATION_CACHE_DIR": "/c",
    }
    env = child_env(compiler, target, ["/tests"], outside)
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env["XLA_FLAGS"] == "--xla_dump_to=/tmp/x"
    assert env["CUDA_ROOT"] == "/x"
    assert env["PYTHONPATH"].split(os.pathsep)[:2] == [str(tmp_path / "cuda"), "/tests"]
    assert env["PYTHONPATH"].endswith("/mine")
    cpus = child_env(Compiler("cpu", {}, None, {}), find_target("4xCPU", {}), env=outside)
    assert "--xla_force_host_platform_device_count=4" in cpus["XLA_FLAGS"]


@pytest.mark.parametrize("name", [n for n, d in known_devices({}).items() if d.platform in ("cuda", "rocm")])
def test_every_described_gpu_has_a_target_config(name):
    device = known_devices({})[name]
    text = target_config(device)
    assert text.count("{") == text.count("}")
    fields = dict(re.findall(r"^  (\w+): (.*)$", text, re.MULTILINE))
    assert int(fields["device_memory_size"]) == device.memory
    assert int(fields["threads_per_warp"]) == (64 if device.arch.startswith("gfx9") else 32)
    assert fields["name"] == f'"{device.kind}"'
    # Per block by default, per block with opt-in, per core: each is at most the next.
    sizes = [int(fields[f"shared_memory_per_{part}"]) for part in ("block", "block_optin", "core")]
    assert sizes == sorted(sizes)


def test_capabilities_are_named_as_nvidia_does():
    by_name = known_devices({})
    for name, text in {
        "H100": "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
        "RTX4090": "major: 8 minor: 9 feature_extension: NONE",
        "RTX5090": "major: 12 minor: 0 feature_extension: ACCELERATED_FEATURES",
    }.items():
        assert text in target_config(by_name[name])


def test_a_device_that_is_not_described_well_enough_says_what_is_missing():
    with pytest.raises(UserError, match="clock_ghz, bandwidth") as caught:
        target_config(Device("Mine", "cuda", 2**30, "Mine", "sm_90", 10, (1, 2, 3), 100))
    assert caught.value.where == "[Mine]"


# As Google Cloud's pages for v4, v5p and v5e name their slices.
@pytest.mark.parametrize(
    ("kind", "chips", "shape"),
    [("TPUv5p", n, s) for n, s in {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4),
                                   128: (4, 4, 8), 256: (4, 8, 8), 512: (8, 8, 8), 1: (1, 1, 1)}.items()]
    + [("TPUv5e", n, s) for n, s in {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8),
                                     128: (8, 16), 256: (16, 16)}.items()],
)  # fmt: skip
def test_slices_have_googles_shapes(kind, chips, shape):
    assert slice_shape(chips, known_devices({})[kind].host_chips or ()) == shape


def test_an_impossible_slice_is_refused_with_the_nearest_possible_ones():
    with pytest.raises(UserError, match="5 devices form no slice of TPUv5p") as caught:
        tpu_slice(find_target("5xTPUv5p", {}))
    assert "4xTPUv5p" in (caught.value.fix or "")
    with pytest.raises(UserError, match="3 devices form no slice of TPUv7x"):
        tpu_slice(find_target("3xTPUv7x", {}))  # a chip is two of them


def test_several_slices_and_chips_of_two_devices():
    assert tpu_slice(find_target("2x16xTPUv5e", {})) == (
        "v5e:4x4",
        {"chips_per_host_bounds": (2, 4, 1), "num_slices": 2},
    )
    assert tpu_slice(find_target("8xTPUv7x", {}))[0] == "tpu7x:2x2x1"
    assert tpu_slice(find_target("4xTPUv4", {}))[1]["chip_config_name"] == "megacore"


@pytest.mark.parametrize(
    ("message", "size"),
    [
        # The messages of libtpu 0.0.42 and 0.0.51, and of older versions.
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (118.87G) "
            "exceeds available HBM (95.74G).",
            118.87 * 2**30,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.", 20.5 * 2**30),
        ("RESOURCE_EXHAUSTED: no figure at all", None),
    ],
)
def test_the_size_of_a_refused_program_is_read_from_the_message(message, size):
    assert refused_bytes(message) == (None if size is None else int(size))


# Functions that run in the compiler process.


def describe(target, devices, values):
    return {"values": values, "devices": len(devices), "platform": devices[0].platform, "target": str(target)}


def refuses(target, devices):
    raise UserError("not possible", where="somewhere", fix="do otherwise")


def crashes(target, devices):
    import sys

    print("the last line", file=sys.stderr, flush=True)
    os.abort()


def sleeps(target, devices):
    from meshtune.plan.compilers.process import report_stage

    report_stage("sleeping")
    time.sleep(60)


def test_a_function_is_called_with_the_described_devices():
    answer = run(find_target("3xCPU", {}), "test_compilers:describe", {"values": [1, "two"]}, paths=[FOLDER])
    assert answer == {"values": [1, "two"], "devices": 3, "platform": "cpu", "target": "3xCPU"}


def test_a_user_error_in_the_compiler_process_is_raised_in_the_caller():
    with pytest.raises(UserError, match="not possible") as caught:
        run(find_target("CPU", {}), "test_compilers:refuses", paths=[FOLDER])
    assert (caught.value.where, caught.value.fix) == ("somewhere", "do otherwise")


def test_a_compiler_that_crashes_is_reported_with_its_last_lines():
    with pytest.raises(UserError, match="SIGABRT") as caught:
        run(find_target("CPU", {}), "test_compilers:crashes", paths=[FOLDER])
    assert "the last line" in caught.value.what


def test_a_compiler_that_takes_too_long_is_killed_after_reporting_progress():
    stages: list[str] = []
    start = time.monotonic()
    with pytest.raises(UserError, match="was not done after 3 s"):
        run(
            find_target("CPU", {}),
            "test_compilers:sleeps",
            paths=[FOLDER],
            limit=3,
            progress=lambda stage, seconds: stages.append(stage),
        )
    assert time.monotonic() - start < 20
    assert stages[0] == "starting"


TINY = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Recipe:
    """A recipe for a model with a config but no weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    fields = {"model": str(tmp_path), "data": {"train": "none.jsonl", "max_length": 64}, "output": str(tmp_path / "o")}
    return Recipe.model_validate({**fields, "train": {"batch_size": 8, "micro_batch": 4}, "mesh": {"fsdp": 4}})


def test_a_recipe_is_compiled_from_its_config_alone_and_the_result_is_cached(tiny, tmp_path, monkeypatch):
    stages: list[str] = []
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "elsewhere"))
    target = find_target("4xCPU", {})
    first = compile_recipe(tiny, target, progress=lambda stage, seconds: stages.append(stage))
    assert (first.rows, first.length, first.accumulation) == (4, 64, 2)
    assert first.mesh == {"dp": 1, "fsdp": 4, "cp": 1, "ep": 1, "tp": 1}
    assert first.out_of_memory is None
    # Weights are float32 on a CPU: embedding, head, and in three layers q, o, k, v, gate, up, down. All divide by 4;
    # norms (7 of 32) are replicated.
    weights = 2 * 96 * 32 + 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert first.breakdown["frozen"] == {"device": 4 * (weights // 4 + 7 * 32), "host": 0}
    # All arguments but the seed are in the breakdown, and the CPU's compiler pads nothing.
    assert first.argument_bytes == sum(sizes["device"] for sizes in first.breakdown.values()) + 4
    assert first.device_bytes > first.argument_bytes
    assert any(collective["kind"] == "all-gather" for collective in first.collectives or [])
    assert {"precision", "mesh", "remat", "attention"} <= {choice["name"] for choice in first.choices}

    def never(*args, **kwargs):
        raise AssertionError("compiled again")

    monkeypatch.setattr("meshtune.plan.compilers.compile.run", never)
    second = compile_recipe(tiny.model_copy(update={"seed": 5, "output": "elsewhere"}), target)
    assert second.cached
    assert [path.suffix for path in (tmp_path / "elsewhere/plans").iterdir()] == [".json"]
    assert not (tmp_path / "cache").exists(), "where plans are without MESHTUNE_CACHE"
    monkeypatch.delenv("MESHTUNE_CACHE")
    with pytest.raises(AssertionError, match="compiled again"):
        compile_recipe(tiny, target)
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "elsewhere"))
    assert second == type(second)(**(first.to_json() | {"cached": True}))
    with pytest.raises(AssertionError, match="compiled again"):
        compile_recipe(tiny.model_copy(update={"seed": 5}), find_target("4xCPU", {}), length=32)


def test_a_truncated_cache_entry_is_not_used(tiny, tmp_path):
    path = tmp_path / "entry.json"
    path.write_text('{"target": "4xC')
    assert _read(path) is None
    path.write_text('{"target": "4xCPU", "of_another_version": 1}')
    assert _read(path) is None
