"""The card of generated data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

CARD, REPORT = "README.md", "generated.json"
COUNTS = "counts.json"  # while records are made
RECORDS, PAIRS, HELD_OUT, HELD_OUT_PAIRS = "records.jsonl", "pairs.jsonl", "held-out.jsonl", "held-out-pairs.jsonl"
RECORD_FILES = (RECORDS, PAIRS, HELD_OUT, HELD_OUT_PAIRS)


def card(report: Mapping[str, Any]) -> str:
    """A dataset card in Markdown: what the records are, what was dropped, how to train on them."""
    recipe, files = report["recipe"], report["records"]
    total = sum(files.values())
    size = next(name for limit, name in SIZES if total < limit)
    lines = ["---", "tags: [synthetic, meshtune]", f"size_categories: [{size}]", "---", "# Generated records", ""]
    lines += [
        f"Written by **{report['teacher']}** from the sources below, seed {recipe.get('seed', 0)}. Its licence says "
        "whether its answers may be trained on.",
        "",
    ]
    lines += _table("file", files)
    lines += _table("kind", report["kinds"])
    lines += _table("source", report["sources"])
    if report["general"]:
        lines += [f"{report['general']} records ({report['general_share']:.0%}) of records.jsonl are general data.", ""]
    tokens = report["tokens"]
    price = f", ${report['dollars']:.4f}" if report["dollars"] else ""
    lines += [f"{tokens['prompts']:,} tokens of prompts, {tokens['answers']:,} of answers{price}.", ""]
    for title, names in (("Documents left out", [f"{name}: {why}" for name, why in report["skipped_documents"]]),
                         ("Sources that changed meanwhile", report["changed_sources"]),
                         ("Requests that failed", report["failed"])):  # fmt: skip
        if names:
            lines += [f"## {title}", "", *(f"- {name}" for name in names[:50]), ""]
    if report["dropped"]:
        lines += [
            "## Dropped",
            "",
            f"Of {report['made']} records and answers:",
            "",
            *_table("filter", report["dropped"]),
        ]
        for name, examples in report["examples"].items():
            for example in examples:
                text = " ".join(example["text"].split())
                lines.append(f"- *{name}* ({example['reason']}), {example['source']}, {example['place']}: {text}")
        lines.append("")
    names = [name for name in ("records.jsonl", "pairs.jsonl") if name in files]
    lines += ["## Training", "", "```yaml"]
    for name in names:
        lines += [f"data: {{train: {name}}}" + ("" if name == "records.jsonl" else "  # stage: dpo")]
    lines += [
        "```",
        "",
        "Every record has `provenance`: source, place, kind, teacher, the prompt's hash, seed and scores.",
        "",
    ]
    lines += ["## Recipe", "", "```json", json.dumps(recipe, indent=2, ensure_ascii=False), "```", ""]
    return "\n".join(lines)


SIZES = ((1000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (2**63, "n>1M"))


def _table(name: str, counts: Mapping[str, int]) -> list[str]:
    if not counts:
        return []
    return [f"| {name} | records |", "| --- | --- |", *(f"| {key} | {value:,} |" for key, value in counts.items()), ""]
