"""transformers with peft: one update for each line of the standard input, a JSON line for each."""

from __future__ import annotations

import json
import sys
import time

from model import ALPHA, ATTENTION, RANK, RATE, batch


def main(folder: str, method: str, experts: str) -> None:
    import peft
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=experts
    )
    if method != "full":
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if method == "lora" else None
        config = peft.LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=list(ATTENTION),
            target_parameters=parameters,
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, config)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
    print(json.dumps({"parameters": sum(parameter.numel() for parameter in trained)}), flush=True)
    for number, _ in enumerate(sys.stdin):
        ids = torch.from_numpy(batch(number))
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        began, processor = time.perf_counter(), time.process_time()
        # Targets are shifted already, as on the other side.
        loss = model(input_ids=inputs, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = {"seconds": time.perf_counter() - began, "processor": time.process_time() - processor}
        print(json.dumps(seconds | {"loss": loss.item()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
