"""A run that does not fit is refused before anything is loaded, and what the refusal offers fits when it is tried."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

import meshtune
from meshtune.config.load import load_recipe
from meshtune.costs.hardware import find_target
from meshtune.mesh.processes import Job
from meshtune.mesh.rendezvous import ProcessInfo
from meshtune.setup.fit import ESTIMATE_ERROR, MemoryCheck
from meshtune.setup.memory import FreeMemory
from meshtune.setup.search import autotune
from meshtune.setup.shortage import MemoryShortage
from meshtune.train.run_setup import CompiledShortage, check_compiled

MODEL = pathlib.Path(meshtune.__file__).parent / "quickstart/model"
LENGTH = 512
IN_BACKWARD = ("method=full", "optimizer.in_backward=true", "optimizer.max_grad_norm=null")


def check(free: int, *changes: str, target: str = "CPU", length: int = LENGTH) -> MemoryCheck:
    fields = {
        "model": str(MODEL),
        "data": {"train": "none.jsonl", "max_length": length},
        "output": "out",
        "train": {"steps": 2, "batch_size": 96},
    }
    recipe, machine = load_recipe(fields, changes), find_target(target, env={})
    resolved = autotune(recipe, machine)[0]
    shared = machine.device.platform == "cpu"
    return MemoryCheck(recipe, resolved, machine, None, length, FreeMemory(free, 1 << 50, shared))


def offered(shortage: MemoryShortage) -> list[str]:
    """The changes that a fix begins with, as they are pasted."""
    return [word for word in (shortage.fix or "").partition(" is expected to fit")[0].split() if "=" in word]


def test_what_fits_is_not_refused():
    assert check(64 << 30).before_loading() is None


def test_a_refusal_has_the_number_what_is_free_and_the_micro_batch_that_fits():
    shortage = check(256 << 20).before_loading()
    assert shortage is not None
    assert shortage.what.startswith("an update is expected to need about ")
    assert shortage.what.endswith("of memory on each device, and 256 MiB are free")
    assert shortage.where == f"train.micro_batch: 96 rows of {LENGTH} positions at once"
    (change,) = offered(shortage)
    assert change.startswith("train.micro_batch=")
    assert "the result stays the same" in (shortage.fix or "")
    assert "compute.memory_check=false" in (shortage.fix or "")


RECIPES = {
    "plain": (),
    "layers that are recomputed": ("compute.remat=full",),
    "layers that are not": ("compute.remat=selective",),
    "every choice open": ("train.micro_batch=auto",),
    "full": ("method=full",),
    "bfloat16": ("compute.precision=bfloat16",),
    "updates in the backward pass": IN_BACKWARD,
    "pairs": ("stage=dpo",),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("mebibytes", [16, 100, 500])
def test_what_a_refusal_offers_fits(name, mebibytes):
    """With the change, on the same device, the run is not refused, and it is the largest micro-batch of which that is
    true where everything else is fixed."""
    refused = check(mebibytes << 20, *RECIPES[name], target="RTX4090")
    shortage = refused.before_loading()
    if shortage is None:
        assert mebibytes == 500
        return
    changes = offered(shortage)
    if not changes:
        assert "meshtune plan shows which" in (shortage.fix or "")
        return
    given = [change for change in RECIPES[name] if change.split("=")[0] not in {c.split("=")[0] for c in changes}]
    assert check(mebibytes << 20, *given, *changes, target="RTX4090").before_loading() is None, changes


def test_the_offer_is_the_largest_micro_batch_that_fits():
    refused = check(100 << 20, "compute.remat=full")
    rows = refused.micro_batch()
    assert rows is not None
    fitting = {
        n: check(100 << 20, "compute.remat=full", f"train.micro_batch={n}").before_loading() is None
        for n in range(1, 96)
        if 96 % n == 0
    }
    assert fitting[rows]
    # Of those that are not refused it leaves the reserve of a device's driver.
    assert len([n for n, fits in fitting.items() if n > rows and fits]) <= 1


def test_estimates_are_given_their_error():
    """A run is refused only where more than the estimate's error is lacking; the compiler's figure decides later."""
    expected = check(0).before_loading()
    assert expected is not None
    needed = check(1 << 50)._predict(check(1 << 50).resolved)
    assert needed is not None
    size = needed.estimate.device_bytes
    assert check(int(size * (1 - ESTIMATE_ERROR)) + 1).before_loading() is None
    assert check(int(size * (1 - ESTIMATE_ERROR)) - 1).before_loading() is not None


def test_host_memory_that_offloading_needs_is_checked_too():
    offloads = ("compute.offload=[residual]", "compute.remat=full")
    small = dataclasses.replace(check(1 << 50, *offloads, target="RTX4090"), free=FreeMemory(1 << 50, 1 << 20, False))
    shortage = small.before_loading()
    assert shortage is not None
    assert "of memory of the host for each device, and 1.0 MiB are free" in shortage.what


def test_the_compiled_step_is_checked_with_the_compilers_number():
    """Of a step that needs twice the estimate, half as many rows are offered."""
    memory, job = check(900 << 20, "compute.remat=full"), Job(ProcessInfo())
    check_compiled(memory, arguments=1 << 20, temporary=1 << 20, job=job)
    with pytest.raises(CompiledShortage) as caught:
        check_compiled(memory, arguments=1 << 20, temporary=1 << 50, job=job)
    assert "the compiled step needs 1048576 GiB of memory on each device" in caught.value.what
    assert "1048576 GiB of them beside what is loaded" in caught.value.what
    predicted = memory._predict(memory.resolved)
    assert predicted is not None
    size = predicted.estimate.device_bytes
    tight = check(size, "compute.remat=full")
    alone, corrected = tight.micro_batch(size), tight.micro_batch(2 * size)
    assert alone == 48
    assert corrected is not None
    assert corrected < alone
