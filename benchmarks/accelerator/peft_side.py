"""transformers with peft on one device: LoRA and QLoRA updates, or greedy decoding, on random weights made there.

Gradient checkpointing, fused AdamW and scaled-dot-product attention (flash-attn and Liger where they are installed and
asked for). QLoRA needs bitsandbytes. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import time
from typing import Any

from models import MODELS, RANK, config_of, flops_per_token, print_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--quantize", choices=["none", "nf4"], default="none")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--updates", type=int, default=0)
    parser.add_argument("--decode", type=int, default=0, help="tokens to decode instead of updates")
    parser.add_argument("--liger", action="store_true")
    args = parser.parse_args()
    print_result(decode(args) if args.decode else tune(args))


def random_model(args: argparse.Namespace) -> Any:
    """The base model with random weights on the device, nf4 where asked."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    gpu = torch.cuda.is_available()
    if args.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    dtype = torch.bfloat16 if gpu else torch.float32
    config = transformers.AutoConfig.for_model(**config_of(args.model, "bfloat16" if gpu else "float32"))
    flash = gpu and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if flash else "sdpa"
    with torch.device("cuda" if gpu else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if args.quantize == "nf4":
        quantise(model, dtype)
    return model


def quantise(model: Any, dtype: Any) -> None:
    """Every linear layer but the head becomes bitsandbytes' nf4 with double quantisation, one after the other."""
    import bitsandbytes
    import torch

    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for name, module in linear:
        if name == "lm_head":
            continue
        parent, _, child = name.rpartition(".")
        narrow = bitsandbytes.nn.Linear4bit(
            module.in_features, module.out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
        )
        where = module.weight.device
        narrow.weight = bitsandbytes.nn.Params4bit(
            module.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
        ).to(where)  # pyright: ignore[reportAttributeAccessIssue] - of its stubs
        setattr(model.get_submodule(parent), child, narrow)
    model.is_loaded_in_4bit = True
    torch.cuda.empty_cache()


def tune(args: argparse.Namespace) -> dict[str, Any]:
    """Times LoRA updates."""
    import peft
    import torch

    gpu, model = torch.cuda.is_available(), random_model(args)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    if args.quantize == "nf4":
        model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    adapter = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = peft.get_peft_model(model, adapter)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=gpu)
    device = "cuda" if gpu else "cpu"
    tokens = torch.randint(3, MODELS[args.model]["vocab_size"], (args.rows, args.length), device=device)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for _ in range(args.updates):
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16) if gpu else contextlib.nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))  # waits for the update
        seconds.append(time.perf_counter() - start)
    count = args.rows * args.length
    return {
        "seconds": seconds,
        "tokens": count,
        "flops": count * flops_per_token(args.model, args.length),
        "losses": [losses[0], losses[-1]],
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "versions": versions(),
        "attention": model.config._attn_implementation,
    }


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Times greedy decoding of `decode` tokens after prompts of `length`: the first, and all that follow."""
    import torch

    gpu, model = torch.cuda.is_available(), random_model(args).eval()
    device = "cuda" if gpu else "cpu"
    prompts = torch.randint(3, MODELS[args.model]["vocab_size"], (args.rows, args.length), device=device)

    def timed() -> tuple[float, float]:
        times = [time.perf_counter()]

        def note(ids: Any, scores: Any, **_: Any) -> Any:
            if gpu and len(times) == 1:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        with torch.no_grad():
            out = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=args.decode,
                min_new_tokens=args.decode, do_sample=False, pad_token_id=0, stopping_criteria=[note],
            )  # fmt: skip
        assert out.shape[1] == args.length + args.decode
        if gpu:
            torch.cuda.synchronize()
        return times[1] - times[0], time.perf_counter() - times[1]

    timed()
    first, following = timed()
    return {
        "first_token_seconds": first,
        "tokens_per_second": args.rows * (args.decode - 1) / following,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of what this side is made of."""
    names = ("torch", "transformers", "peft", "bitsandbytes", "flash_attn", "liger_kernel")
    return {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}


if __name__ == "__main__":
    main()
