"""Memory that runs out is an ordinary error, whoever reports it, and free memory is counted within every limit."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from typer.main import get_command

from meshtune.cli import failure
from meshtune.cli.main import app
from meshtune.errors import UserError
from meshtune.setup import shortage
from meshtune.setup.shortage import MemoryShortage, as_shortage, explain_shortage, host_memory, ran_out


def device_error() -> BaseException:
    """JAX's own, of a device without room."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jnp.zeros(2**45, "float32") + 1)
    return caught.value


def host_error() -> BaseException:
    """NumPy's own, of a host without room."""
    with pytest.raises(MemoryError) as caught:
        np.zeros(2**60, np.uint8)
    return caught.value


def test_errors_of_devices_and_hosts_name_what_was_asked_for_and_what_is_free():
    device, host = as_shortage(device_error(), "fix"), as_shortage(host_error(), "fix")
    assert device.what.startswith("the device has no room for another 131072 GiB: RESOURCE_EXHAUSTED")
    assert host.what.startswith("the host has too little memory (Unable to allocate 1.00 EiB")
    for error in (device, host):
        assert "are free on this host" in error.what
        assert error.fix == "fix"
    assert as_shortage(device, "other") is device


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("RESOURCE_EXHAUSTED: of another library"), False),
        (ValueError("out of memory"), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory"), True),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shapes"), False),
    ],
)
def test_only_errors_of_memory_are_explained(error, expected):
    assert ran_out(error) == expected
    with pytest.raises(MemoryShortage if expected else type(error)), explain_shortage(lambda: "fix"):
        raise error


def test_a_compilers_figure_is_read_with_its_unit():
    text = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm."
    assert "another 20.5 GiB" in as_shortage(jax.errors.JaxRuntimeError(text), "").what


def test_limits_of_control_groups_count(tmp_path, monkeypatch):
    """Files as the kernel's, of both versions: the smaller limit holds, and cached files can be given up."""
    machine = host_memory()
    assert machine.available <= machine.total <= psutil.virtual_memory().total
    for folder, limit, usage in (
        (tmp_path, "max", "current"),
        (tmp_path / "memory", "limit_in_bytes", "usage_in_bytes"),
    ):
        folder.mkdir(exist_ok=True)
        (folder / f"memory.{limit}").write_text("max\n")
        (folder / f"memory.{usage}").write_text(f"{3 << 20}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 20}\n")
    monkeypatch.setattr(shortage, "CGROUPS", tmp_path)
    assert host_memory().total == machine.total
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{10 << 20}\n")
    assert (host_memory().total, host_memory().available) == (10 << 20, 8 << 20)


def test_a_limit_of_the_address_space_counts():
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31));"
        "from meshtune.setup.shortage import host_memory as h; print(h().total == 2**31 and 0 < h().available < 2**31)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 2**31


def test_every_command_explains_memory_that_ran_out_with_options_that_it_has():
    commands = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    for verb, command in commands.items():
        shown = failure.explain(host_error(), [verb, "--debug", "x"])
        assert isinstance(shown, UserError), verb
        options = {name for parameter in command.params for name in parameter.opts}
        named = {word.strip(",;") for word in (shown.fix or "").split() if word.startswith("--")}
        assert named <= options, verb
    assert failure.explain(RuntimeError("ours"), ["train"]) is None
