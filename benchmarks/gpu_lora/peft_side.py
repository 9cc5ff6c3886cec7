"""transformers with peft on one device: rows of random tokens, gradient checkpointing, AdamW. Prints one JSON line."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--quantize", choices=["none", "nf4"], default="none")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--liger", action="store_true")
    given = parser.parse_args()

    import peft
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if given.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    attention = "flash_attention_2" if cuda and importlib.util.find_spec("flash_attn") else "sdpa"
    more = {}
    if given.quantize == "nf4":
        more["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        given.model,
        dtype=torch.bfloat16 if cuda else torch.float32,
        attn_implementation=attention,
        device_map={"": device},
        **more,
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    if given.quantize == "nf4":
        model = peft.prepare_model_for_kbit_training(model)
    adapter = peft.LoraConfig(r=given.rank, lora_alpha=2 * given.rank, target_modules="all-linear")
    model = peft.get_peft_model(model, adapter)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=cuda)
    tokens = torch.randint(3, 500, (given.rows, given.length), device=device)
    seconds, loss = [], float("nan")
    for _ in range(given.updates):
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext():
            found = model(input_ids=tokens, labels=tokens).loss
        found.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = float(found)
        seconds.append(time.perf_counter() - began)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "loss": loss,
                "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
                "attention": attention,
                "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")},
            }
        )
    )


if __name__ == "__main__":
    main()
