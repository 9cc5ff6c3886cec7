"""The options of how a model is computed, read by recipes and by the model alike."""

from __future__ import annotations

import dataclasses
from typing import Literal

from meshtune.options import option

AttentionName = Literal["auto", "direct", "splash", "cudnn", "triton", "blockwise"]
RematName = Literal["none", "selective", "full"]
ExchangeName = Literal["auto", "gather", "all_to_all"]
CacheName = Literal["int8"]
OffloadName = Literal["residual", "optimizer", "weights", "tables"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """What a recipe sets itself of model.compute.Compute; there the numbers of tokens are resolved."""

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


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a run: frozen and trainable weights, activations (`compute`) and optimizer state (`state`)."""

    name: str
    frozen: str
    trainable: str
    compute: str
    state: str
