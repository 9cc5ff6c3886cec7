"""The formats of quantised weights. A new one is a `format.Format` and one line here.

FORMATS are those that weights are quantised in; PUBLISHED those of codes that are taken from files unchanged.
"""

from __future__ import annotations

from meshtune.lazy import LazyTable
from meshtune.quantize.config import FormatName, StoredFormatName
from meshtune.quantize.format import Format

FORMATS: LazyTable[FormatName, Format] = LazyTable(
    {
        "nf4": "meshtune.quantize.nf4:NF4",
        "int4": "meshtune.quantize.integers:INT4",
        "int8": "meshtune.quantize.integers:INT8",
        "fp8": "meshtune.quantize.fp8:FP8",
    }
)
PUBLISHED: LazyTable[StoredFormatName, Format] = LazyTable(
    {
        "e4m3": "meshtune.quantize.fp8:E4M3",
        "mxfp4": "meshtune.quantize.mxfp4:MXFP4",
        "uint4": "meshtune.quantize.integers:UINT4",
        "uint8": "meshtune.quantize.integers:UINT8",
        "bnb_nf4": "meshtune.quantize.bitsandbytes:BNB_NF4",
        "bnb_fp4": "meshtune.quantize.bitsandbytes:BNB_FP4",
        "llm_int8": "meshtune.quantize.bitsandbytes:LLM_INT8",
    }
)
STORED: LazyTable[StoredFormatName, Format] = LazyTable({**FORMATS.targets, **PUBLISHED.targets})
