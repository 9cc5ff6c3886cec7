"""What a finished run leaves: a PEFT adapter, or a whole Hugging Face model, verified by reading it again."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from meshtune.adapters.config import LoraConfig, Method
from meshtune.adapters.method import Prepared
from meshtune.adapters.peft_format import BaseRecord
from meshtune.adapters.verify import export_adapter
from meshtune.model.tree import merge
from meshtune.train.output import ADAPTER, MODEL
from meshtune.weights.export import export_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def export_result(
    output: pathlib.Path,
    made: Prepared,
    method: Method,
    source: pathlib.Path,
    base: BaseRecord,
    tokenizer: PreTrainedTokenizerFast,
) -> pathlib.Path:
    """Writes output/adapter (lora) or output/model (full, freeze) and returns it; an earlier one is replaced.

    The tokenizer, with the chat template that was trained with, goes along. Raises UserError if what was written does
    not give the logits of what was trained; the checkpoints are there still.
    """
    if isinstance(method, LoraConfig):
        dest = export_adapter(output / ADAPTER, made, method, base)
    else:
        dest = output / MODEL
        export_model(merge(made.trainable, made.frozen), made.spec, source, dest, overwrite=True)
    tokenizer.save_pretrained(str(dest))
    return dest
