"""How the model's numbers are computed: choices that change speed and memory, never the mathematics."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from meshtune.options import option

if TYPE_CHECKING:
    from meshtune.mesh.layout import Layout

AttentionName = Literal["auto", "direct", "splash", "cudnn", "triton", "blockwise"]
RematName = Literal["none", "selective", "full"]
ExchangeName = Literal["auto", "gather", "all_to_all"]
CacheName = Literal["int8"]
OffloadName = Literal["residual", "optimizer", "weights", "tables"]


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a run: frozen and trainable weights, activations (`compute`) and optimizer state (`state`)."""

    name: str
    frozen: str
    trainable: str
    compute: str
    state: str


@dataclasses.dataclass(frozen=True)
class Compute:
    """Resolved choices: `auto` is decided before (setup.choices), but for attention, which is chosen by shape.

    The options with a description are keys of a recipe's section compute (config.recipe.ComputeSection).

    `dtype` is that of activations and matrix products; `loss_chunk` is in tokens of one row.
    `layout` says how activations lie on a mesh; None: on one device. `platform` is the JAX platform the program is for
    ("": the one here), `chip` the arch of its devices ("sm_90a", "gfx942"; "": that of the first one here).
    `packed=False` promises that a row is one document and then padding; `shared_prompts` says that segments of a row
    may continue another one (Inputs.parent_ids).
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
    shared_prompts: bool = False
    cache: CacheName | None = None
    _: dataclasses.KW_ONLY
    attention: AttentionName = option(
        "auto",
        "The attention backend; auto: the first that serves, in this order. splash: TPU; cudnn: NVIDIA, "
        "one document a row; triton: NVIDIA and AMD; blockwise: everywhere; direct: short rows.",
    )
    mlp_chunk: int | None = option(
        None, "Tokens of a row whose feed-forward layer exists at once; auto: by size; null: the whole row."
    )
    attention_chunk: int | None = option(
        None,
        "Tokens of a row whose queries, attention and feed-forward layer exist at once, for rows of tens "
        "of thousands of tokens; auto: by size; null: the whole row.",
    )
    offload: tuple[OffloadName, ...] = option(
        (),
        "What is kept in the host's memory: residual, the residual stream at the input of each layer; "
        "optimizer, its state; weights, the layers' frozen weights, and with optimizer.in_backward the trained ones; "
        "tables, the frozen embedding and output head, of which each is on the device while it is used.",
    )
    expert_exchange: ExchangeName = option(
        "auto",
        "How tokens reach experts on other devices of mesh.ep: gather: each device takes the tokens of all; "
        "all_to_all: each token goes to the devices of its experts; auto: by the number of experts a token has.",
    )

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
    platform = compute.platform or _backend()
    gpu = platform in ("cuda", "rocm", "gpu")
    return STREAMING if gpu and not {"weights", "optimizer"}.isdisjoint(compute.offload) else {}


def compiler_options(platform: str = "") -> dict[str, str] | None:
    """For a program that meets bf16 weights, or None where its platform ("": the one here) needs nothing.

    XLA multiplies in float32 on a CPU. Left to itself it widens the weights of all layers before the loop over them,
    and holds twice the model once more; this way each layer is widened when its turn comes.
    """
    if (platform or _backend()) != "cpu":
        return None
    return {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


def _backend() -> str:
    """JAX's default backend. JAX is imported only here: recipes are read without it."""
    import jax

    return jax.default_backend()
