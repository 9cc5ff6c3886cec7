"""Writes the base of a run whose adapter initialisation changed the weights, as a Hugging Face model."""

from __future__ import annotations

import dataclasses
import pathlib

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.merge import merge_adapters
from meshtune.adapters.method import PreparedModel, of_adapters
from meshtune.adapters.peft_format import BaseRecord
from meshtune.arrays.tree import flatten, merge, unflatten
from meshtune.digests import write_digests
from meshtune.mesh.collective_errors import raise_collectively
from meshtune.mesh.layout import Layout
from meshtune.mesh.processes import Job
from meshtune.runs.output import BASE
from meshtune.weights.export import export_model
from meshtune.weights.fingerprint import base_hash


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
