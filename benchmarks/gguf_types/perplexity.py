"""The perplexity of a model as GGUF files of several types, computed by llama.cpp (xllamacpp), on one text.

    PYTHONPATH=src:tests python benchmarks/gguf_types/perplexity.py MODEL TEXT.jsonl --windows 6

TEXT has JSON lines with the key "text", which are joined. Every window has 512 tokens, of which the last 256 are
scored.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from llama_cpp import LlamaCpp
from meshtune.data.tokenizer import load_tokenizer
from meshtune.runs.export import export

WINDOW, SCORED = 512, 256


def loss(model: LlamaCpp, ids: list[int]) -> float:
    """The mean loss of the last SCORED tokens of a window."""
    logits = model.logits(ids).astype(np.float64)[WINDOW - SCORED - 1 : -1]
    logits -= logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits, np.asarray(ids[WINDOW - SCORED :])[:, None], 1)[:, 0]
    return float((np.log(np.exp(logits).sum(-1)) - chosen).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--types", nargs="+", default=["F32", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0"])
    options = parser.parse_args()
    lines = options.text.read_text(encoding="utf-8").splitlines()
    text = "\n\n".join(json.loads(line)["text"] for line in lines[: 40 * options.windows])
    ids = load_tokenizer(options.model).encode(text, add_special_tokens=False)
    windows = [ids[WINDOW * n : WINDOW * (n + 1)] for n in range(options.windows)]
    assert len(windows[-1]) == WINDOW, "the text is too short"
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.types:
            file = Path(folder) / f"{kind}.gguf"
            export(options.model, file, gguf=kind)
            with LlamaCpp(file) as model:
                losses = [loss(model, window) for window in windows]
            result = {"type": kind, "megabytes": round(file.stat().st_size / 1e6, 1)}
            print(json.dumps(result | {"perplexity": round(float(np.exp(np.mean(losses))), 4)}), flush=True)
            file.unlink()


if __name__ == "__main__":
    main()
