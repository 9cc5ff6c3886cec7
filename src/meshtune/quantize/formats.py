"""The formats of quantised weights. A new one is one module with a `format.Format` and one line here."""

from __future__ import annotations

from meshtune.quantize.config import FormatName
from meshtune.quantize.format import Format
from meshtune.quantize.fp8 import FP8
from meshtune.quantize.int4 import INT4
from meshtune.quantize.int8 import INT8
from meshtune.quantize.nf4 import NF4

FORMATS: dict[FormatName, Format] = {format.name: format for format in (NF4, INT4, INT8, FP8)}
