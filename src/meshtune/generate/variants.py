"""What the variants of one base share as they are loaded: how it is quantised, and how a tokenizer is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from meshtune.data.tokenizer import check_vocabulary, load_tokenizer
from meshtune.errors import UserError
from meshtune.quantize.config import UNQUANTISED, FormatName, QuantizeConfig, check_format
from meshtune.quantize.formats import FORMATS
from meshtune.runs.sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.adapters.peft_format import LoadedAdapter


def tokenizer_on_disk(source: Source, vocab: int) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a source that has its files; None where it may be one to download, which can wait."""
    if not (Path(source.tokenizer) / "tokenizer.json").is_file():
        return None
    tokenizer = load_tokenizer(source.tokenizer, source.chat_template)
    check_vocabulary(tokenizer, vocab)
    return tokenizer


def base_quantisation(
    quantize: QuantizeConfig | str | None, adapters: Mapping[str, LoadedAdapter]
) -> QuantizeConfig | None:
    """How the base of some adapters is to be quantised: with "auto" as they were trained on it. Raises UserError where
    they differ, and for an unknown format."""
    if quantize == "auto":
        trained_on = {name: adapter.base.quantised for name, adapter in adapters.items()}
        if len(set(trained_on.values())) > 1:
            listed = ", ".join(f"{name}: {config or 'none'}" for name, config in trained_on.items())
            raise UserError(
                f"the adapters were trained on bases that are quantised differently ({listed})",
                where="quantize",
                fix="say how the base is to be held (quantize: nf4, int8, fp8, int4 or none), or load them one by one",
            )
        return next(iter(trained_on.values()), None)
    if quantize is None or isinstance(quantize, QuantizeConfig):
        return quantize
    check_format(quantize, (*FORMATS, UNQUANTISED))
    return QuantizeConfig(cast(FormatName, quantize), requantise=quantize != UNQUANTISED)
