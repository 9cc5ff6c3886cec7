"""llama.cpp's form of the families: architecture, metadata and tensors of a model in a GGUF file.

`gguf_layout(spec)` says how a model is written, `config_of(metadata, ..)` reads the config of a file back. Both go by
ARCHITECTURES; a family that llama.cpp computes as another one does is one line there.
"""

from __future__ import annotations

from meshtune.families.gguf.architecture import Architecture
from meshtune.families.gguf.layout import GgufLayout, gguf_layout
from meshtune.families.gguf.part import GgufKey, GgufPart
from meshtune.families.gguf.read import config_of

__all__ = ["Architecture", "GgufKey", "GgufLayout", "GgufPart", "config_of", "gguf_layout"]
