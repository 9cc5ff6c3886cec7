"""`meshtune env` and `meshtune version`: what this installation is and what it can run on."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "transformers", "tokenizers", "datasets", "grain", "numpy")


def version() -> None:
    """Print Meshtune's version."""
    print(f"meshtune {metadata.version('meshtune')}")


def env() -> None:
    """Show the devices, and the versions to name in a report."""
    from meshtune.setup.devices import device_table
    from meshtune.terminal import console

    console().print(device_table())
    print(f"meshtune {metadata.version('meshtune')}, Python {platform.python_version()}, {platform.platform()}")
    print(", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))
