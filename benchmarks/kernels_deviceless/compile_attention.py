"""What runs in the compiler's process: attention compiled for described devices, and what its kernels take."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any

import code_object

KERNELS = {"forward_kernel": "forward", "query_grads": "dq", "key_grads": "dkv"}


def compiled(target: Any, devices: list[Any], cases: dict[str, dict[str, Any]], dump: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from meshtune.kernels.attention import AttentionInputs, AttentionRequest, choose_backend
    from meshtune.kernels.attention.triton_kernels import tiles_of

    place = SingleDeviceSharding(devices[0])
    answer = {}
    for name, case in cases.items():
        B, T, H, K, h = (case[key] for key in ("batch", "length", "heads", "kv_heads", "head_dim"))
        request = AttentionRequest(
            batch=B, q_length=T, kv_length=T, heads=H, kv_heads=K, head_dim=h, dtype="bfloat16", scale=h**-0.5,
            window=case.get("window"), softcap=case.get("softcap"), aligned=True,
            platform=target.device.platform, chip=target.device.arch,
        )  # fmt: skip
        backend = choose_backend(request)[0]

        def both(q, k, v, g, positions, segments, backend=backend, request=request):
            tokens = positions, positions, segments, segments
            out, pull = jax.vjp(lambda q, k, v: backend.run(AttentionInputs(q, k, v, *tokens), request), q, k, v)
            return out, *pull(g)

        def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

        q, k, tokens = array(B, T, H, h), array(B, T, K, h), array(B, T, dtype=jnp.int32)
        shutil.rmtree(dump, ignore_errors=True)
        began = time.monotonic()
        try:
            program = jax.jit(both).lower(q, k, k, q, tokens, tokens).compile()
        except jax.errors.JaxRuntimeError as error:
            answer[name] = {"error": re.sub(r"\s+", " ", str(error))[:200]}
            continue
        answer[name] = found = {
            "backend": backend.name,
            "seconds": round(time.monotonic() - began, 1),
            "temp_bytes": program.memory_analysis().temp_size_in_bytes,
        }
        if backend.name == "triton":
            taken = _nvidia(dump, target.device.arch) if target.device.platform == "cuda" else _amd(program)
            found["kernels"] = _with_tiles(taken, _shared(dump), tiles_of(request))
    return answer


def _with_tiles(taken: dict[str, dict[str, int]], shared: dict[str, int], tiles: Any) -> list[dict[str, Any]]:
    rows = []
    for kernel, name in KERNELS.items():
        tile = getattr(tiles, name)
        block = [tile.q, tile.kv, tile.warps, tile.stages]
        rows.append({"kernel": name, "tile": block, "shared": shared[kernel], **taken[kernel]})
    return rows


def _shared(dump: str) -> dict[str, int]:
    """Bytes of shared memory of each kernel, from XLA's list of what it will launch."""
    (path,) = (path for path in pathlib.Path(dump).glob("*.thunk_sequence.txt") if "attention_" in path.read_text())
    found = re.findall(r"attention_(\w+) .*shared_memory: (\d+)", path.read_text(encoding="utf-8"))
    return {kernel: int(count) for kernel, count in found}


def _nvidia(dump: str, arch: str) -> dict[str, dict[str, int]]:
    """What ptxas says of each kernel's PTX."""
    (ptxas,) = {
        path for folder in map(pathlib.Path, sys.path) for path in folder.glob("nvidia/*/bin/ptxas") if path.is_file()
    }
    taken = {}
    for path in pathlib.Path(dump).glob("*.ptx"):
        if not (kernel := re.search(r"\.entry attention_(\w+)", path.read_text(encoding="utf-8"))):
            continue
        command = [str(ptxas), "-v", f"-arch={arch}", str(path), "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        (spilled,), (registers,) = re.findall(r"(\d+) bytes spill stores", said), re.findall(r"Used (\d+) reg", said)
        taken[kernel[1]] = {"registers": int(registers), "spilled": int(spilled)}
    return taken


def _amd(program: Any) -> dict[str, dict[str, int]]:
    """What the code object's metadata says of each kernel."""
    kernels = code_object.kernels(program.runtime_executable().serialize())
    return {
        name.removeprefix("attention_"): {
            "registers": facts[".vgpr_count"],
            "spilled": facts[".vgpr_spill_count"],
        }
        for name, facts in kernels.items()
        if name.startswith("attention_")
    }
