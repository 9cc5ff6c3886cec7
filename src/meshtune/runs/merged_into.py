"""Which base an adapter of a quantised base is merged into."""

from __future__ import annotations

from meshtune.adapters.peft_format import BaseRecord
from meshtune.errors import UserError, nearest
from meshtune.quantize.config import QuantizeConfig

INTO = ("dequantised", "full")


def merged_into(base: BaseRecord, into: str | None) -> QuantizeConfig | None:
    """Returns the quantisation of the base that an adapter is merged into, or None for full precision."""
    if into not in (None, *INTO):
        raise UserError(
            f"an adapter cannot be merged into '{into}'", where="--into", fix=f"{nearest(into, INTO)}one of {INTO}"
        )
    if into == "dequantised" and base.quantize is None:
        raise UserError(
            "the adapter was not trained on a quantised base, so there is nothing to dequantise",
            where="--into",
            fix="leave --into out",
        )
    return None if into == "full" else base.quantised
