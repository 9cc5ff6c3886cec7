"""Text models inside vision-language models: the vision towers are in the files, and pass through."""

from __future__ import annotations

import transformers

from families.case import Case
from families.cases.gemma3 import CASES as GEMMA3
from families.cases.gemma4 import CASES as GEMMA4
from families.cases.llama4 import CASES as LLAMA4
from families.cases.ministral import CASES as MINISTRAL
from families.cases.qwen3_5 import CASES as QWEN3_5_CASES

SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
PIXTRAL = {key: value for key, value in SIGLIP.items() if key != "model_type"} | {
    "model_type": "pixtral",
    "head_dim": 8,
}
LLAMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
    "vision_output_dim": 16,
}
# Patterns of peft, which would otherwise adapt the projections of the vision tower too.
IN_TEXT = r"model\.language_model\.layers\..*_proj"

QWEN3_5 = QWEN3_5_CASES[0]
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
CASES = (
    Case(
        "gemma3_vision",
        "gemma3",
        {**GEMMA3[0].config, "final_logit_softcapping": None},
        text="gemma3_text",
        outside={"vision_config": SIGLIP, "mm_tokens_per_image": 4, "image_token_index": 200},
        auto_class=transformers.AutoModelForImageTextToText,
        peft={"target_modules": IN_TEXT},
    ),
    Case(
        "gemma4_vision",
        "gemma4",
        {**GEMMA4[0].config, "vocab_size": 100, "pad_token_id": 99},
        text="gemma4_text",
        outside={"vision_config": GEMMA4_VISION, "audio_config": None, "image_token_id": 200},
        auto_class=transformers.AutoModelForImageTextToText,
        randomise=GEMMA4[0].randomise,
        peft={"target_modules": IN_TEXT},
        variant=True,
    ),
    Case(
        "llama4_vision",
        "llama4",
        LLAMA4[0].config,
        text="llama4_text",
        outside={"vision_config": LLAMA4_VISION},
        auto_class=transformers.AutoModelForImageTextToText,
        variant=True,
    ),
    Case(
        "mistral3_vision",
        "mistral3",
        {"sliding_window": None, "head_dim": 8},
        text="mistral",
        outside={"vision_config": PIXTRAL, "image_token_index": 200, "tie_word_embeddings": False},
        auto_class=transformers.AutoModelForImageTextToText,
        peft={"target_modules": IN_TEXT},
    ),
    Case(
        "ministral3_vision",
        "mistral3",
        MINISTRAL[0].config,
        text="ministral3",
        outside={"vision_config": PIXTRAL, "image_token_index": 200, "tie_word_embeddings": True},
        auto_class=transformers.AutoModelForImageTextToText,
        peft={"target_modules": IN_TEXT},
        variant=True,
    ),
    Case(
        "qwen3_5_vision",
        "qwen3_5",
        QWEN3_5.config,
        text="qwen3_5_text",
        outside={"vision_config": QWEN_VISION, "tie_word_embeddings": False},
        auto_class=transformers.AutoModelForImageTextToText,
        randomise=QWEN3_5.randomise,
        variant=True,
    ),
)
