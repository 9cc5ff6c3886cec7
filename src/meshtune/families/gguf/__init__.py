"""llama.cpp's form of the families: architecture, metadata and tensors of a model in a GGUF file.

`gguf_layout(spec)` describes how a model is written, `read_config(metadata, ..)` reads the config of a file back. Both
go by ARCHITECTURES; a family that llama.cpp computes as another one is one line there.
"""

from __future__ import annotations

from meshtune.families.gguf.architecture import Architecture
from meshtune.families.gguf.layout import GgufLayout, GgufPart, gguf_layout
from meshtune.families.gguf.read import read_config

__all__ = ["Architecture", "GgufLayout", "GgufPart", "gguf_layout", "read_config"]
