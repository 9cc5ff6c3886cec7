"""Errors for a model_type that no family implements: known elsewhere, a composite, misspelt, or unknown."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from meshtune.errors import UserError

# The causal language models of transformers 5 (its MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).
KNOWN = frozenset(
    """
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation big_bird
    bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom blt camembert codegen cohere cohere2 cohere2_moe
    cohere_compass_text cpmant ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
    diffllama doge dots1 dots3_note dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe
    falcon falcon_h1 falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4
    gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text git glm glm4 glm4_moe
    glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj
    granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe
    kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4 llama4_text longcat_flash mamba mamba2 marian mbart
    megatron-bert mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
    mixtral mllama modernbert-decoder moshi moss_transcribe_diarize mpt musicgen musicgen_melody mvp nanochat
    nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phi4_multimodal
    phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert
    roformer rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta
    xlm-roberta-xl xlnet xlstm xmod youtu zamba zamba2 zaya
    """.split()
)
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")  # where a composite keeps its own


def unsupported_error(config: Mapping[str, Any], families: Collection[str], where: str) -> UserError:
    """The error for a config whose model_type is not among `families`.

    A name is suggested only for a misspelling: qwen3_moe resembles qwen3, but following that advice would be wrong.
    """
    model_type = config.get("model_type")
    supported = f"supported: {', '.join(sorted(families))}"
    where = f"{where}, field model_type"
    if not isinstance(model_type, str):
        return UserError(f"model_type is {model_type!r}", where=where, fix=f"give the model's type; {supported}")
    for key in TEXT_CONFIGS:
        if isinstance(inner := config.get(key), Mapping) and (text_type := inner.get("model_type")):
            return _composite(model_type, str(text_type), key, families, where)
    misspelt = [
        family for family in families if _letters(family) == _letters(model_type) or _one_edit(family, model_type)
    ]
    if misspelt and model_type not in KNOWN:
        return UserError(
            f"model_type '{model_type}' is unknown", where=where, fix=f"did you mean '{misspelt[0]}'? {supported}"
        )
    state = "is a known model that Meshtune does not support" if model_type in KNOWN else "is not supported"
    return UserError(f"model_type '{model_type}' {state}", where=where, fix=f"use a model of another type; {supported}")


def _composite(model_type: str, text_type: str, key: str, families: Collection[str], where: str) -> UserError:
    fix = f"use another model; supported: {', '.join(sorted(families))}"
    problem = f"its text model '{text_type}' ({key}) is not supported"
    if text_type in families:
        fix = f"save its language model alone with transformers, as a model of type '{text_type}', and give that"
        problem = f"this composite around the text model '{text_type}' ({key}) is not supported"
    return UserError(f"model_type '{model_type}' is a composite, and {problem}", where=where, fix=fix)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _one_edit(family: str, name: str) -> bool:
    """Whether one inserted, deleted or changed letter turns `name` into `family`; digits are versions, not misspelt."""
    if abs(len(family) - len(name)) > 1:
        return False
    prefix = next(
        (i for i, (a, b) in enumerate(zip(family, name, strict=False)) if a != b), min(len(family), len(name))
    )
    for f, n in ((1, 1), (1, 0), (0, 1)):
        changed = family[prefix : prefix + f] + name[prefix : prefix + n]
        if family[prefix + f :] == name[prefix + n :] and changed.isalpha():
            return True
    return False
