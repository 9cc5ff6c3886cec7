"""A tuned model that sees, here and as its merged export opens in transformers: log-probabilities and greedy answers.

    python benchmarks/vision/round_trip.py RUN DATA EXPORT [--questions 50]

RUN is a run of easy_vqa.py (LoRA and a projector), EXPORT a folder for `meshtune export --merge` in float32, or one
that has it already. Both sides are given the same questions of easy-vqa's test split. Prints the largest difference of
a log-probability of any token of question and answer, those of each side from the export in float64 by transformers,
and how many greedy answers (of 6 tokens at most) are the same, as JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

import meshtune
from meshtune.generate.pictures import insert_pictures, load_picture
from meshtune.generate.target_log_probs import TargetText

TOKENS = 6


def main() -> None:
    """Exports, compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("export", type=pathlib.Path)
    parser.add_argument("--questions", type=int, default=50)
    options = parser.parse_args()
    command = [sys.executable, "-m", "meshtune", "export", str(options.run), "--to", str(options.export)]
    if not options.export.exists():
        subprocess.run([*command, "--merge", "--dtype", "float32"], check=True)
    lines = (options.data / "test.llamafactory.jsonl").read_text().splitlines()[: options.questions]
    records = [json.loads(line) for line in lines]
    paths = [options.data / record["images"][0] for record in records]
    questions, expected = zip(
        *[[message["content"] for message in record["messages"]] for record in records], strict=True
    )
    questions = [question.removeprefix("<image>") for question in questions]

    here = meshtune.load(options.run, dtype="float32")
    parts = [
        [{"type": "image", "image": str(path)}, {"type": "text", "text": question}]
        for path, question in zip(paths, questions, strict=True)
    ]
    messages = [[{"role": "user", "content": content}] for content in parts]
    answers = [str(answer).strip() for answer in here.generate(messages, max_tokens=TOKENS, temperature=0)]
    there, exact = (
        transformers.AutoModelForImageTextToText.from_pretrained(options.export, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.export)
    processor = GotOcr2ImageProcessorPil.from_pretrained(options.export)
    reader = here.picture_reader
    assert reader is not None
    torch.set_num_threads(1)
    same, differences, rounding = 0, list[float](), {"meshtune": list[np.ndarray](), "transformers": list[np.ndarray]()}
    for path, question, answer, right in zip(paths, questions, answers, expected, strict=True):
        text = f"<|im_start|>user\n<IMG_CONTEXT>\n{question}<|im_end|>\n<|im_start|>assistant\n"
        begun = insert_pictures(reader, tokenizer(text).input_ids, [load_picture(reader, str(path), "question")])
        ids = [*begun.ids, *tokenizer(right).input_ids]
        (ours,) = here.target_log_probs([TargetText(tuple(ids), 1, begun.pictures)])
        image = Image.open(path).convert("RGB")
        pixels = torch.tensor(np.asarray(processor([image])["pixel_values"]))
        with torch.no_grad():
            theirs, true = (
                model(input_ids=torch.tensor([ids]), pixel_values=pixels.to(model.dtype))
                .logits[0, :-1]
                .log_softmax(-1)[range(len(ids) - 1), ids[1:]]
                .double()
                .numpy()
                for model in (there, exact)
            )
            prompt = torch.tensor([begun.ids])
            mask = torch.ones_like(prompt)
            out = there.generate(
                input_ids=prompt, attention_mask=mask, pixel_values=pixels, max_new_tokens=TOKENS, do_sample=False,
                eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
            )  # fmt: skip
        differences.append(float(np.abs(ours.log_probabilities - theirs).max()))
        rounding["meshtune"].append(np.abs(ours.log_probabilities - true))
        rounding["transformers"].append(np.abs(theirs - true))
        same += tokenizer.decode(out[0, len(begun.ids) :], skip_special_tokens=True).strip() == answer
    from_float64 = {
        name: {"largest": float(every.max()), "mean": float(every.mean())}
        for name, every in ((name, np.concatenate(parts)) for name, parts in rounding.items())
    }
    result = {"questions": len(records), "largest_difference": max(differences), "from_float64": from_float64}
    print(json.dumps(result | {"same_answers": same}))


if __name__ == "__main__":
    main()
