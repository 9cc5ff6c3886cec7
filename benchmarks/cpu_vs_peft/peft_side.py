"""transformers' Trainer with peft on a CPU: one arm of run.py. Prints a JSON line after every update."""

from __future__ import annotations

import argparse
import json
import pathlib


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--arm", choices=["default", "grouped", "fixed"], required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    given = parser.parse_args()

    import peft
    import torch
    import transformers

    from data import tokenised

    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    rows = tokenised(given.data, given.updates * given.sequences, tokenizer, given.length)
    # float32, as on the other side: the checkpoint's bf16 would be slower on a CPU without bf16 units.
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    adapter = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, adapter)
    padding = {"padding": "max_length", "max_length": given.length} if given.arm == "fixed" else {"padding": True}

    class Report(transformers.TrainerCallback):
        def on_log(self, _arguments, _state, _control, logs=None, **_):
            if logs and "loss" in logs:
                print(json.dumps({"loss": float(logs["loss"])}), flush=True)

    arguments = transformers.TrainingArguments(
        output_dir="/tmp/cpu_vs_peft",
        per_device_train_batch_size=given.sequences,
        max_steps=given.updates,
        learning_rate=2e-4,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        train_sampling_strategy="group_by_length" if given.arm == "grouped" else "random",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    collator = transformers.DataCollatorForSeq2Seq(tokenizer, **padding)
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[Report()]
    )
    trainer.train()
    print(json.dumps({"learned_tokens": sum(label != -100 for row in rows for label in row["labels"][1:])}), flush=True)


if __name__ == "__main__":
    main()
