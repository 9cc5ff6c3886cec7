"""Questions per processor second of Meshtune and of transformers with peft, on the same questions of easy-vqa.

    python benchmarks/vision/throughput.py MODEL DATA OUTPUT [--questions N] [--rounds N]

Both train LoRA of rank 16 on the language model and the projector in full, tower frozen, in float32 on one thread, with
rows of 256 tokens. Meshtune packs them. transformers takes the same questions packed in order, as one row whose
documents do not see one another (a mask of four dimensions, and positions that restart), or padded, as a batch. Each
arm is a process, and the arms alternate. Counted is all processor time of a process, which also reads the pictures, for
each update but the first, and the median is taken: start and compilation do not count. Prints medians as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

LENGTH, RATE = 256, 1e-4
ARMS = ("meshtune", "packed", "padded")
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}


def processor_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(arm: str, options: argparse.Namespace, records: pathlib.Path) -> float:
    """Questions per processor second of one pass over the questions, from a log with a line for each update."""
    output = options.output / arm
    shutil.rmtree(output, ignore_errors=True)
    log = output / "metrics.jsonl"
    command = [sys.executable, __file__, options.model, str(options.data), str(output), "--arm", arm]
    command += ["--records", str(records)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | ONE_THREAD)
    seconds: list[float] = []
    while process.poll() is None:
        time.sleep(0.01)
        lines = log.read_text().splitlines() if log.exists() else []
        while len(seconds) < len(lines) and process.poll() is None:
            seconds.append(processor_seconds(process.pid))
    assert process.returncode == 0, command
    learned = [json.loads(line)["learned_tokens"] for line in log.read_text().splitlines()][: len(seconds)]
    costs = [(after - before) / n for (before, after), n in zip(itertools.pairwise(seconds), learned[1:], strict=True)]
    return options.questions / sum(learned) / statistics.median(costs)


def train_meshtune(options: argparse.Namespace) -> None:
    """A pass over the questions, one row an update."""
    import meshtune

    meshtune.train(
        {
            "model": options.model,
            "data": {"train": str(options.records), "max_length": LENGTH},
            "vision": {"train": ["projector"], "media_dir": str(options.data.resolve())},
            "method": {"kind": "lora", "rank": 16},
            "train": {"epochs": 1, "batch_size": 1},
            "optimizer": {"learning_rate": RATE},
            "compute": {"precision": "float32", "remat": "none"},
            "checkpoint": {"every": 10_000},
            "output": str(options.output),
        }
    )


def train_transformers(options: argparse.Namespace, *, packed: bool) -> None:
    """The same pass by transformers and peft."""
    import peft
    import torch
    import transformers
    from PIL import Image
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    fields = json.loads((pathlib.Path(options.model) / "preprocessor_config.json").read_text())
    pixels_of = GotOcr2ImageProcessorPil(**{k: v for k, v in fields.items() if not k.endswith(("_type", "_class"))})
    model = transformers.AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.float32)
    adapter = peft.LoraConfig(r=16, lora_alpha=32, target_modules=r".*language_model.*\.(" + "|".join(LINEAR) + ")")
    model = peft.get_peft_model(model, adapter)
    for name, parameter in model.named_parameters():
        if "multi_modal_projector" in name:
            parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)

    def encode(record: dict) -> tuple[list[int], list[int], str]:
        question, answer = (message["content"].removeprefix("<image>") for message in record["messages"])
        places = "<img>" + "<IMG_CONTEXT>" * 4 + "</img>"
        prompt = f"<|im_start|>user\n{places}\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids, learned = (tokenizer(text).input_ids for text in (prompt, f"{answer}<|im_end|>"))
        return ids + learned, [-100] * len(ids) + learned, record["images"][0]

    rows, room = [[]], LENGTH
    for document in (encode(json.loads(line)) for line in options.records.read_text().splitlines()):
        if len(document[0]) > room:
            rows, room = [*rows, []], LENGTH
        rows[-1].append(document)
        room -= len(document[0])
    options.output.mkdir(parents=True)
    with (options.output / "metrics.jsonl").open("w", buffering=1) as log:
        for row in rows:
            images = [Image.open(path).convert("RGB") for *_, path in row]
            pixels = torch.tensor(pixels_of(images, return_tensors="np")["pixel_values"])
            if packed:
                lengths = torch.tensor([len(ids) for ids, *_ in row])
                segment = torch.repeat_interleave(torch.arange(len(row)), lengths)
                sees = (segment[:, None] == segment[None, :]) & torch.ones(len(segment), len(segment)).tril().bool()
                mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None, None]
                ids, labels = (
                    torch.tensor([list(itertools.chain(*column))]) for column in list(zip(*row, strict=True))[:2]
                )
                positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
                inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}
            else:
                longest = max(len(ids) for ids, *_ in row)
                columns = {
                    "input_ids": [ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, *_ in row],
                    "labels": [labels + [-100] * (longest - len(labels)) for _, labels, _ in row],
                    "attention_mask": [[1] * len(ids) + [0] * (longest - len(ids)) for ids, *_ in row],
                }
                inputs = {name: torch.tensor(column) for name, column in columns.items()}
            loss = model(**inputs, pixel_values=pixels, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0)
            optimizer.step()
            learned = int((inputs["labels"] != -100).sum())
            log.write(json.dumps({"loss": loss.item(), "learned_tokens": learned}) + "\n")


def main() -> None:
    """Measures the arms in turn, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--records", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm == "meshtune":
        train_meshtune(options)
        return
    if options.arm:
        train_transformers(options, packed=options.arm == "packed")
        return
    options.output.mkdir(parents=True, exist_ok=True)
    records = options.output / "records.jsonl"
    lines = (options.data / "train.llamafactory.jsonl").read_text().splitlines()[: options.questions]
    content = [json.loads(line) for line in lines]
    content = [row | {"images": [str((options.data / row["images"][0]).resolve())]} for row in content]
    records.write_text("".join(json.dumps(row) + "\n" for row in content))
    speeds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(options.rounds):
        for arm in ARMS if number % 2 == 0 else reversed(ARMS):
            speeds[arm].append(measure(arm, options, records))
            print(arm, round(speeds[arm][-1], 2), flush=True)
    medians = {arm: round(statistics.median(values), 2) for arm, values in speeds.items()}
    ratio = medians["meshtune"] / max(medians["packed"], medians["padded"])
    print(json.dumps({"questions_per_processor_second": medians, "ratio": round(ratio, 2), "rounds": speeds}, indent=1))


if __name__ == "__main__":
    main()
