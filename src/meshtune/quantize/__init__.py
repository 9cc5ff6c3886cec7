"""Quantised weights, as pytrees that replace the weights in a parameter tree.

A new format is one module with a `format.Format` and one line in FORMATS.
"""

from __future__ import annotations

from meshtune.quantize.format import Format
from meshtune.quantize.fp8 import FP8
from meshtune.quantize.int4 import INT4
from meshtune.quantize.int8 import INT8
from meshtune.quantize.nf4 import NF4

FORMATS: dict[str, Format] = {format.name: format for format in (NF4, INT4, INT8, FP8)}
