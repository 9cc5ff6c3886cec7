"""Resolves the chunk lengths that the MLP, attention and the loss are computed in, to bound their memory."""

from __future__ import annotations

from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.mesh.layout import Layout
from meshtune.model.spec import ModelSpec
from meshtune.translatable import Translatable

WIDE_BYTES = 128 * 2**20  # target size of one MLP activation, 16-bit, per device
ATTENTION_BYTES = 64 * 2**20  # target size of one array of queries, 16-bit, per device
LOGITS_BYTES = 64 * 2**20  # target size of the float32 logits that exist at once on a device
LEAST = 256  # tokens on a device: shorter chunks make matmuls too small to use it well


def chunks_of(
    recipe: Recipe, spec: ModelSpec, rows: int, length: int, layout: Layout | None
) -> tuple[int | None, int | None, list[tuple[str, str, str]]]:
    """Returns (mlp_chunk, attention_chunk, banner lines as (name, value, reason)) for micro-batches of `rows` rows.

    Chunks are in tokens; None computes the whole row at once.

    Raises: UserError for attention chunks with context parallelism or where every mixer needs whole rows.
    """
    options = recipe.compute
    cp = layout.size("cp") if layout is not None else 1
    if options.attention_chunk is not None and cp > 1:
        raise UserError(
            f"compute.attention_chunk takes rows apart that mesh.cp={cp} has split over devices already",
            where="compute.attention_chunk, mesh.cp",
            fix="leave out attention_chunk (mlp_chunk works with cp), or give cp's devices to fsdp or tp",
        )
    if options.attention_chunk is not None and (mixer_name := _only_whole_rows(spec)):
        if options.attention_chunk != "auto":
            raise UserError(
                f"this model has {mixer_name} layers, which need whole rows",
                where="compute.attention_chunk",
                fix="leave out attention_chunk; mlp_chunk works",
            )
        options = options.model_copy(update={"attention_chunk": None})
    device_rows = _device_rows(rows, layout)
    heads = layout.size("tp") if layout is not None else 1
    choices = []

    def resolve(name: str, chunk: int | str | None, width: int, target_bytes: int) -> int | None:
        if chunk is None:
            return None
        reason = Translatable("asked for")
        if chunk == "auto":
            fitting = target_bytes * heads * cp // (2 * device_rows * width)
            chunk = max(LEAST, 1 << (max(1, fitting).bit_length() - 1))
            reason = Translatable("auto: about {size} MiB an array", size=target_bytes >> 20)
        unchunked = int(chunk) >= length
        part = Translatable("{count} of {length} tokens", count=chunk, length=length)
        choices.append((name, Translatable("the whole row") if unchunked else part, reason))
        return None if unchunked else int(chunk)

    mlp = resolve("mlp_chunk", options.mlp_chunk, _widest(spec, "ffn"), WIDE_BYTES)
    attention = resolve("attention_chunk", options.attention_chunk, _widest(spec, "heads"), ATTENTION_BYTES)
    return mlp, attention, choices


def loss_chunk_of(recipe: Recipe, spec: ModelSpec, rows: int, length: int, layout: Layout | None) -> tuple[int, str]:
    """Returns the positions of each row whose logits exist at once, and why, for micro-batches of `rows` rows.

    Every chunk reads the whole head, and adds to all of its gradient where it is trained, so that a device should have
    LEAST tokens in each, even if their logits are more than LOGITS_BYTES.
    """
    asked_for = recipe.compute.loss_chunk
    if asked_for is not None:
        return min(max(1, asked_for // rows), length), Translatable("asked for")
    device_rows = _device_rows(rows, layout)
    token_bytes = 4 * spec.vocab // (layout.size("tp") if layout is not None else 1)
    positions = max(LEAST, LOGITS_BYTES // token_bytes) // device_rows
    chunk = min(max(16, 1 << (max(1, positions).bit_length() - 1)), length)
    size = max(1, chunk * device_rows * token_bytes >> 20)
    return chunk, Translatable("auto: {size} MiB of logits at once on a device", size=size)


def _device_rows(rows: int, layout: Layout | None) -> int:
    return max(1, rows // (layout.size("dp", "fsdp", "ep") if layout is not None else 1))


def _widest(spec: ModelSpec, axis: str) -> int:
    """Returns the width of the widest activation along a logical axis, over all blocks."""
    costs = (block.cost(spec.embed) for block in spec.blocks)
    return max(
        (activation.width for cost in costs for activation in cost.activations if activation.axis == axis), default=1
    )


def _only_whole_rows(spec: ModelSpec) -> str | None:
    """Returns the name of a mixer if none of the model's can be computed in chunks, or None.

    Where some can, the others are computed for whole rows.
    """
    mixers = [kind.mixer for kind in spec.layer_kinds if kind.mixer is not None]
    chunked = any(mixer.row_params() is not None for mixer in mixers)
    return None if chunked or not mixers else mixers[0].name
