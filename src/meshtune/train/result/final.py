"""Writes the result of a finished run, a PEFT adapter or a Hugging Face model, and verifies it by reloading it."""

from __future__ import annotations

import dataclasses
import functools
import gc
import pathlib
import shutil
from typing import TYPE_CHECKING, Any

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.method import PreparedModel, of_adapters
from meshtune.adapters.peft_format import BaseRecord
from meshtune.adapters.training_method import Method
from meshtune.adapters.verify import export_adapter
from meshtune.arrays.tree import Tree, flatten, merge, unflatten
from meshtune.data.tokenizer import padding_id
from meshtune.digests import write_digests
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.mesh.layout import Layout
from meshtune.mesh.processes import SINGLE_PROCESS, Job, raise_collectively
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.quantize.weight import QuantisedWeight
from meshtune.runs.output import ADAPTER, BASE, MODEL
from meshtune.train.checkpoint.checkpoints import Best
from meshtune.weights.export import export_model, write_generation
from meshtune.weights.finite import find_overflow
from meshtune.weights.inspect import base_hash
from meshtune.weights.load import load_config, stored_dtype
from meshtune.weights.safetensors_files import tensors_of
from meshtune.weights.verify import RoundingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.generate.api import Model
    from meshtune.generate.chat import ChatSession
    from meshtune.train.report.figure import NotebookFigure
    from meshtune.train.report.notebook import Report, Samples


def own_base(
    output: pathlib.Path,
    model: PreparedModel,
    config: LoraConfig,
    source: pathlib.Path,
    base: BaseRecord,
    layout: Layout | None,
    job: Job,
) -> BaseRecord:
    """Returns the base that the adapter records: `base`, or output/base if LoftQ with several iterations changed it.

    output/base is then written and verified: the dequantised weights, in the compute dtype. All processes of `job` must
    call this.
    """
    if not config.changes_base:
        return base
    params = flatten(merge(model.trainable, model.frozen))
    weights = merge_adapters(unflatten({path: leaf for path, leaf in params.items() if not of_adapters(path)}))
    record = {"loftq": {"base": base.path, "hash": base.hash, "quantize": base.quantize, "rank": config.rank}}
    dest = output / BASE
    export_model(
        weights,
        model.spec,
        source,
        dest,
        dtype=model.spec.dtype,
        overwrite=True,
        record=record,
        layout=layout,
        job=job,
    )
    with raise_collectively(job, "export: base's digests"):
        if job.is_main_process:
            write_digests(dest)
    return dataclasses.replace(base, path=str(dest), hash=base_hash(dest), quantize=None)


def _dtype(params: Tree, spec: ModelSpec, source: pathlib.Path) -> str:
    """The source's dtype, or float32 where training has moved numbers beyond it, as it may beyond float16."""
    dtype = stored_dtype(source, load_config(source))
    if dtype != "float16" or find_overflow(tensors_of(tensors(spec), flatten(params), dtype)) is None:
        return dtype
    return "float32"


def export_result(
    output: pathlib.Path,
    model: PreparedModel,
    method: Method,
    source: pathlib.Path,
    base: BaseRecord,
    tokenizer: PreTrainedTokenizerFast,
    *,
    ends: tuple[int, ...] = (),
    layout: Layout | None = None,
    job: Job = SINGLE_PROCESS,
) -> pathlib.Path:
    """Writes output/adapter (lora) or output/model (full, freeze), replacing an earlier one, and returns its path.

    The tokenizer is saved with it, including the chat template of the training, and generation_config.json has `ends`,
    the ids at which answers were taught to end, and those of `source`. A base that LoftQ changed is written to
    output/base. Parameters on a mesh are sharded by `layout`; all processes of `job` must call this. Raises UserError
    if the written files do not reproduce the trained model's logits; checkpoints are kept.
    """
    adapters = method.adapters
    dest = output / (MODEL if adapters is None else ADAPTER)
    if job.is_main_process:
        for left in output.glob(f".{dest.name}.partial-*"):  # by an export that was killed
            shutil.rmtree(left)
    if adapters is not None:
        base = own_base(output, model, adapters, source, base, layout, job)
        export_adapter(dest, model, adapters, base, Compute(layout=layout), job)
    else:
        params = model.parameters
        if any(isinstance(leaf, QuantisedWeight) for leaf in flatten(model.frozen).values()):
            params = merge_adapters(unflatten(flatten(params)))  # a copy of the dicts, which are used up
        options = {"overwrite": True, "layout": layout, "job": job, "pad": padding_id(tokenizer), "ends": ends}
        try:
            export_model(params, model.spec, source, dest, dtype=_dtype(params, model.spec, source), **options)
        except RoundingError:  # the base's dtype cannot hold what was learned
            export_model(params, model.spec, source, dest, dtype="float32", **options)
    with raise_collectively(job, "export: tokenizer"):
        if job.is_main_process:
            for file in (*dest.glob("chat_template.*"), *dest.glob("additional_chat_templates/*")):
                file.unlink()  # of the source: what the tokenizer has now is written
            tokenizer.save_pretrained(str(dest))
            if adapters is not None:
                write_generation(dest, source, ends)
            write_digests(dest)
            for left in output.glob(f".{dest.name}.old-*"):
                shutil.rmtree(left)
    return dest


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a run, which notebooks show with its loss.

    `steps` of `total` updates were completed. `loss` is that of the last update, `smoothed_loss` the exponential mean
    that progress and plot show (train.report.smoothing), and `eval_loss` that of the last evaluation, None if this
    process ran none. `path` is the adapter or model, None if the run was interrupted; `interrupted` is then the number
    of the signal.
    """

    output: pathlib.Path
    steps: int
    total: int
    loss: float | None
    eval_loss: float | None
    best: Best | None
    path: pathlib.Path | None
    seconds: float
    interrupted: int | None = None
    smoothed_loss: float | None = None

    def plot(self, metric: str = "loss") -> NotebookFigure:
        """Draws a metric over the updates: "loss", or another name of metrics.jsonl, such as "reward".

        Raises: UserError for a metric that the run has not measured.
        """
        from meshtune.train.report.notebook import plot_metric

        return plot_metric(self.output, metric, self.total)

    @property
    def samples(self) -> Samples:
        """The texts that were generated for `sample.prompts` before, during and after training."""
        from meshtune.train.report.notebook import read_samples

        return read_samples(self.output)

    @property
    def report(self) -> Report:
        """The page report.html: numbers, curves, samples and the recipe."""
        from meshtune.train.report.notebook import Report
        from meshtune.train.report.page import REPORT

        return Report(self.output / REPORT)

    @functools.cached_property
    def model(self) -> Model:
        """The tuned model, loaded at first use.

        Raises: UserError if the run was interrupted, and has no result yet.
        """
        from meshtune.generate.api import load

        if self.path is None:
            raise UserError(
                f"the run was interrupted after update {self.steps} of {self.total}: it has no model yet",
                where=str(self.output),
                fix=f'meshtune.train("{self.output}/recipe.yaml", "resume=true") goes on from there',
            )
        gc.collect()  # what training left in the device's memory
        return load(self.path)

    def chat(self, system: str | None = None, **options: Any) -> ChatSession:
        """Begins a conversation with the tuned model; `options` are those of `Model.chat`."""
        return self.model.chat(system, **options)

    def _repr_html_(self) -> str:
        from meshtune.train.report.notebook import summary_html

        return summary_html(self)
