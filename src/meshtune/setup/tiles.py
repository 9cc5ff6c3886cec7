"""How much of a row exists at once: the chunks of feed-forward layer and of attention, settled from a recipe."""

from __future__ import annotations

from meshtune.config.recipe import Recipe
from meshtune.errors import UserError
from meshtune.mesh.layout import Layout
from meshtune.model.spec import ModelSpec

WIDE_BYTES = 128 * 2**20  # one array as wide as the feed-forward layer, in 16 bits, on one device
ATTENTION_BYTES = 64 * 2**20  # one array as wide as the queries, likewise
LEAST = 256  # tokens: shorter chunks make products too small for a device


def chunks_of(
    recipe: Recipe, spec: ModelSpec, rows: int, length: int, layout: Layout | None
) -> tuple[int | None, int | None, list[tuple[str, str, str]]]:
    """(mlp_chunk, attention_chunk, the choices in words: name, value, reason) for micro-batches of `rows` rows.

    None is the whole row. Raises: UserError for chunks of attention over rows that mesh.cp splits already.
    """
    asked = recipe.compute
    ways = layout.size("cp") if layout is not None else 1
    if asked.attention_chunk is not None and ways > 1:
        raise UserError(
            f"compute.attention_chunk takes rows apart that mesh.cp={ways} has split over devices already",
            where="compute.attention_chunk, mesh.cp",
            fix="leave out attention_chunk (mlp_chunk works with cp), or give cp's devices to fsdp or tp",
        )
    if asked.attention_chunk is not None and (whole := _whole_rows(spec)):
        if asked.attention_chunk != "auto":
            raise UserError(
                f"this model has {whole} layers, which need whole rows",
                where="compute.attention_chunk",
                fix="leave out attention_chunk; mlp_chunk works",
            )
        asked = asked.model_copy(update={"attention_chunk": None})
    here = max(1, rows // (layout.size("dp", "fsdp", "ep") if layout is not None else 1))
    heads = layout.size("tp") if layout is not None else 1
    choices = []

    def settled(name: str, chunk: int | str | None, width: int, most: int) -> int | None:
        if chunk is None:
            return None
        reason = "asked for"
        if chunk == "auto":
            fitting = most * heads * ways // (2 * here * width)
            chunk = max(LEAST, 1 << (max(1, fitting).bit_length() - 1))
            reason = f"auto: about {most >> 20} MiB an array"
        whole = int(chunk) >= length
        choices.append((name, "the whole row" if whole else f"{chunk} of {length} tokens", reason))
        return None if whole else int(chunk)

    mlp = settled("mlp_chunk", asked.mlp_chunk, _widest(spec, "ffn"), WIDE_BYTES)
    attention = settled("attention_chunk", asked.attention_chunk, _widest(spec, "heads"), ATTENTION_BYTES)
    return mlp, attention, choices


def _widest(spec: ModelSpec, axis: str) -> int:
    """The width of the widest array along a logical axis that any block computes."""
    costs = (block.cost(spec.embed) for block in spec.blocks)
    return max((one.width for cost in costs for one in cost.activations if one.axis == axis), default=1)


def _whole_rows(spec: ModelSpec) -> str | None:
    """The name of a mixer that cannot be computed by chunks, if there is one."""
    mixers = (kind.mixer for kind in spec.layer_kinds)
    return next((mixer.name for mixer in mixers if mixer is not None and mixer.row_params() is None), None)
