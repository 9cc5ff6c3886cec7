"""The model card of a push: the hub's metadata, and how the model came to be, in Markdown."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from meshtune.hub.base_model import Base
from meshtune.hub.facts import RunFacts

STAGES = {
    "sft": "supervised fine-tuning",
    "pt": "continued pre-training",
    "rm": "a reward model of preference pairs",
}
LIBRARY = {"adapter": "peft", "model": "transformers", "merged": "transformers", "gguf": "gguf"}
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
ANSWER_SHOWN = 600  # characters


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is pushed: `kind` is adapter, model, merged or gguf; `base` is None where nothing says what it came from;
    `ends` are the tokens at which its texts end."""

    repository: str
    kind: str
    base: Base | None
    run: RunFacts | None
    files: Sequence[str]
    scored: bool = False
    ends: Sequence[str] = ()


def model_card(subject: Subject) -> str:
    """README.md as Markdown, with the hub's metadata in front."""
    sections = [
        _heading(subject),
        _loading(subject),
        *([_training(subject.run), _losses(subject.run)] if subject.run else []),
        _evaluation(subject),
        _licence(subject.base),
    ]
    return f"---\n{_metadata(subject)}\n---\n\n" + "\n\n".join(part for part in sections if part) + "\n"


def _metadata(subject: Subject) -> str:
    from huggingface_hub import ModelCardData

    base, run = subject.base, subject.run
    licence = base.licence if base else None
    fields: dict[str, object] = {"library_name": LIBRARY[subject.kind], "tags": _tags(subject)}
    if base and base.hub_id:
        fields |= {"base_model": base.hub_id, "base_model_relation": _relation(subject)}
    if licence:
        fields["license"] = licence.id
        fields |= {
            key: value for key, value in (("license_name", licence.title), ("license_link", licence.link)) if value
        }
    if run and (datasets := [fact.name for fact in run.data if fact.hub]):
        fields["datasets"] = datasets
    fields["pipeline_tag"] = "text-classification" if subject.scored else "text-generation"
    return ModelCardData(**fields).to_yaml()  # pyright: ignore[reportArgumentType]


def _relation(subject: Subject) -> str:
    """What a result is of its base, in the hub's words; "merge" is there of several models, and not of an adapter."""
    if subject.kind == "gguf" and subject.run is None:
        return "quantized"
    return "adapter" if subject.kind == "adapter" else "finetune"


def _tags(subject: Subject) -> list[str]:
    run = subject.run
    return ["meshtune", *([run.stage] if run else []), *([run.method] if run and run.method != run.stage else [])]


def _heading(subject: Subject) -> str:
    kind = {
        "adapter": "A PEFT adapter for",
        "model": "A model tuned from",
        "merged": "An adapter merged into",
        "gguf": "GGUF files of a model tuned from",
    }[subject.kind]
    lines = [f"# {subject.repository.split('/')[1]}", ""]
    base, run = subject.base, subject.run
    if base is None:
        description = "GGUF files" if subject.kind == "gguf" else "A model"
        return "\n".join([*lines, f"{description}, pushed with Meshtune. Its files do not say what it was tuned from."])
    name = f"[{base.hub_id}](https://huggingface.co/{base.hub_id})" if base.hub_id else f"`{base.name}`"
    revision = f" at revision `{base.revision}`" if base.revision else ""
    lines.append(f"{kind} {name}{revision}, made with Meshtune.")
    if run:
        steps = f" in {run.steps:,} updates" if run.steps else ""
        lines[-1] += f" It was trained by {STAGES.get(run.stage, run.stage.upper())} ({_method(run)}){steps}."
    if base.hash:
        lines += ["", f"Hash of the base's weights: `{base.hash}`."]
    return "\n".join(lines)


def _method(run: RunFacts) -> str:
    """The method with the numbers that its result cannot be used or compared without."""
    sizes = [f"{name} {value:g}" for name, value in (("rank", run.rank), ("alpha", run.alpha)) if value is not None]
    return ", ".join([run.method, *sizes])


def _loading(subject: Subject) -> str:
    repository = subject.repository
    base = subject.base.name if subject.base else "BASE"
    automatic = "AutoModelForSequenceClassification" if subject.scored else "AutoModelForCausalLM"
    if subject.kind == "gguf":
        first = next((name for name in subject.files if name.endswith(".gguf")), "FILE.gguf")
        command = f"llama-cli -hf {repository}\nollama run hf.co/{repository}\n# or: hf download {repository} {first}"
        return f"## Load it\n\n```sh\n{command}\n```"
    own_ends = subject.kind == "adapter" and GENERATION in subject.files and not subject.scored
    further = ", GenerationConfig" if own_ends else ""
    lines = ["## Load it", "", "```python", f"from transformers import {automatic}, AutoTokenizer{further}"]
    if subject.kind == "adapter":
        lines += [
            "from peft import PeftModel",
            "",
            f'base = {automatic}.from_pretrained("{base}"{", num_labels=1" if subject.scored else ""})',
            f'model = PeftModel.from_pretrained(base, "{repository}")',
        ]
    else:
        lines += ["", f'model = {automatic}.from_pretrained("{repository}")']
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{repository}")']
    if own_ends:  # of an adapter other programs read the base's
        lines += [f'model.generation_config = GenerationConfig.from_pretrained("{repository}")']
    lines += ["```"] if subject.scored else ["", *_generating(TEMPLATE in subject.files), "```"]
    if subject.ends and not subject.scored:
        lines += ["", f"Texts end at {', '.join(f'`{end}`' for end in subject.ends)} (generation_config.json)."]
    if not subject.scored:
        named = subject.kind != "adapter" or subject.base is None or subject.base.hub_id is not None
        model = repository if named else f"{base} --adapter {repository}"
        lines += ["", "```sh", f'meshtune generate {model} --prompt "..."', f"meshtune chat {model}", "```"]
    if subject.kind == "adapter" and subject.base and not subject.base.hub_id:
        lines += ["", f"`{base}` stands for a folder with the base, which is not known to be on the hub."]
    return "\n".join(lines)


def _generating(chats: bool) -> list[str]:
    """Python that prints an answer of `model`, by the tokenizer's chat template where there is one."""
    inputs = 'inputs = tokenizer("...", return_tensors="pt")'
    if chats:
        inputs = """messages = [{"role": "user", "content": "..."}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""
    return [inputs, "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=200)[0]))"]


def _training(run: RunFacts) -> str:
    columns = {
        "source": [f"`{fact.name}`" for fact in run.data],
        "split": [fact.split for fact in run.data],
        "revision": [fact.revision for fact in run.data],
        "SHA-256 of the file": [fact.sha256 and f"`{fact.sha256}`" for fact in run.data],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [tuple(shown), ("---",) * len(shown), *zip(*shown.values(), strict=True)]
    lines = ["## Data", "", *(f"| {' | '.join(cell or '' for cell in row)} |" for row in rows)]
    counts = run.counts
    if counts:
        left_out = f", {counts['left_out']:,} left out" if counts.get("left_out") else ""
        lines += ["", f"{counts['samples']:,} {counts['noun']}{left_out}, {counts['tokens']:,} tokens in an epoch, of "]
        lines[-1] += f"which {counts['trained_tokens']:,} are trained on."
    if run.fingerprint:
        lines += ["", f"Hash of the training tokens and their weights: `{run.fingerprint}`."]
    lines += ["", "## Recipe", "", "```yaml", run.recipe.rstrip(), "```"]
    if run.versions:
        lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in run.versions.items()) + "."]
    return "\n".join(lines)


def _losses(run: RunFacts) -> str:
    if not run.losses:
        return ""
    lines = ["## Losses", ""]
    if run.plot is not None:
        lines += ["![loss by update](loss.png)", ""]
    lines += ["| update | epoch | training loss | validation loss |", "| ---: | ---: | ---: | ---: |"]
    for step, epoch, train, validation in run.losses:
        cells = (str(step), f"{epoch:.2f}", _number(train), _number(validation))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "The training loss is that of the update's own batch, before the update."]
    if run.best:
        lines[-1] += f" The best validation loss was {run.best['loss']:.4f}, after update {run.best['step']}."
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _evaluation(subject: Subject) -> str:
    """The comparison with the base, and answers to the prompts that the recipe names."""
    parts = [part for part in (subject.run.evaluation, _answers(subject.run)) if part] if subject.run else []
    return "\n\n".join(["## Before and after", *parts]) if parts else ""


def _answers(run: RunFacts) -> str:
    if not run.samples:
        return ""
    lines = ["Answers to the prompts in the recipe (its `sample` says how they were drawn):"]
    for sample in run.samples:
        texts = (("prompt", sample.prompt), ("base", sample.before), (f"after update {sample.step}", sample.after))
        lines += ["\n".join(f"- {name}:\n\n{_quoted(text)}" for name, text in texts)]
    return "\n\n".join(lines)


def _quoted(text: str) -> str:
    """Text as it is, in a block of code whose fence it cannot end."""
    shown = text.strip() if len(text.strip()) <= ANSWER_SHOWN else f"{text.strip()[:ANSWER_SHOWN]} ..."
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return "\n".join(f"  {line}" for line in (f"{fence}text", *shown.splitlines(), fence)) + "\n"


def _licence(base: Base | None) -> str:
    if base is None:
        return ""
    if base.licence is None:
        return "## Licence\n\nThe base's files state no licence: see where it is published."
    name = base.licence.title or base.licence.id
    link = f" ({base.licence.link})" if base.licence.link else ""
    return f"## Licence\n\nThat of the base: {name}{link}."
