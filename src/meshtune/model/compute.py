"""How the model's numbers are computed: choices that change speed and memory, never the mathematics."""

from __future__ import annotations

import dataclasses

import jax

from meshtune.mesh.layout import Layout
from meshtune.model.config import CacheName, ComputeOptions, RematName


@dataclasses.dataclass(frozen=True)
class Compute(ComputeOptions):
    """Resolved choices ('auto' is settled before this exists, but for attention, which settles by shape).

    `dtype` is that of activations and matrix products; `loss_chunk` is in tokens of one row.
    `layout` says how activations lie on a mesh; None: on one device. `platform` is the JAX platform the program is for
    ("": the one here), `chip` the arch of its devices ("sm_90a", "gfx942"; "": that of the first one here).
    `packed=False` promises that a row is one document and then padding.
    `cache` "int8" holds the keys and values of earlier tokens as codes of 8 bits (coded_cache) where text is generated;
    None: in `dtype`.
    With `offload` "residual", remat is full or selective. Weights and optimizer state in the host's memory say so
    themselves.
    """

    dtype: str = "float32"
    remat: RematName = "none"
    loss_chunk: int = 256
    scan: bool = True
    layout: Layout | None = None
    platform: str = ""
    chip: str = ""
    packed: bool = True
    cache: CacheName | None = None

    @property
    def row_parts(self) -> int:
        """The number of devices that hold the parts of a row."""
        return 1 if self.layout is None else self.layout.size("cp")


# XLA for GPUs has one copy between host and device under way at a time, and each waits for the one before: all of a
# layer's, one after another, and only then its products. So many at once are all begun at the top of a layer, and each
# is waited for where it is first used; and the forward pass fetches a layer while the one before is computed.
STREAMING: dict[str, str | bool | int] = {
    "xla_gpu_experimental_parallel_async_compute_limit": 64,
    "xla_gpu_enable_pipelined_host_offloading": True,
    "xla_gpu_enable_latency_hiding_scheduler": True,
}


def streaming_options(compute: Compute) -> dict[str, str | bool | int]:
    """For a fused step that brings weights or optimizer state from the host, layer by layer."""
    platform = compute.platform or jax.default_backend()
    gpu = platform in ("cuda", "rocm", "gpu")
    return STREAMING if gpu and not {"weights", "optimizer"}.isdisjoint(compute.offload) else {}


def compiler_options(platform: str = "") -> dict[str, str] | None:
    """For a program that meets bf16 weights, or None where its platform ("": the one here) needs nothing.

    XLA multiplies in float32 on a CPU. Left to itself it widens the weights of all layers before the loop over them,
    and holds twice the model once more; this way each layer is widened when its turn comes.
    """
    if (platform or jax.default_backend()) != "cpu":
        return None
    return {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
