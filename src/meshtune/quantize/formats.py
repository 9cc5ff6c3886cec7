"""The formats of quantised weights. A new one is a `format.Format` and one line here.

FORMATS are those that weights are quantised in; PUBLISHED those of codes that are taken from files unchanged.
"""

from __future__ import annotations

from meshtune.quantize.bitsandbytes import BNB_FP4, BNB_NF4, LLM_INT8
from meshtune.quantize.config import FormatName, StoredFormatName
from meshtune.quantize.format import Format
from meshtune.quantize.fp8 import E4M3, FP8
from meshtune.quantize.integers import INT4, INT8, UINT4, UINT8
from meshtune.quantize.mxfp4 import MXFP4
from meshtune.quantize.nf4 import NF4

FORMATS: dict[FormatName, Format] = {"nf4": NF4, "int4": INT4, "int8": INT8, "fp8": FP8}
PUBLISHED: dict[StoredFormatName, Format] = {
    format.name: format for format in (E4M3, MXFP4, UINT4, UINT8, BNB_NF4, BNB_FP4, LLM_INT8)
}
STORED: dict[StoredFormatName, Format] = {**FORMATS, **PUBLISHED}
