"""Compiled programs of generation, kept on disk, so that the next start of a command has them at once."""

from __future__ import annotations

import importlib.util
import pathlib

import jax

from meshtune.cache import cache_folder, processor_key

LEAST_SECONDS = 0.1  # of compiling: faster programs are not worth a file
MOST_BYTES = 2 << 30  # then the programs that were read longest ago go


def keep_programs() -> pathlib.Path | None:
    """Lets JAX keep the programs it compiles in Meshtune's cache folder; returns the folder.

    None where JAX was given another folder (JAX_COMPILATION_CACHE_DIR) or was told to keep none
    (JAX_ENABLE_COMPILATION_CACHE=false), and in several processes.
    """
    config = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache or jax.process_count() > 1:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    folder = cache_folder() / "programs" / processor_key()
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    if importlib.util.find_spec("filelock") is not None:  # which JAX's limit needs
        config.update("jax_compilation_cache_max_size", MOST_BYTES)
    return folder
