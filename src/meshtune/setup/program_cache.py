"""Compiled programs, kept on disk, so that the next start of a command has them at once."""

from __future__ import annotations

import importlib.util
import pathlib

import jax

from meshtune.cache import cache_folder, processor_key

MOST_BYTES = 2 << 30  # then the programs that were read longest ago go


def keep_programs(processes: int = 1) -> pathlib.Path | None:
    """Lets JAX keep the programs it compiles in Meshtune's cache folder; returns the folder.

    Of several processes process 0 writes, and all read: hosts have its programs where they share the folder. Theirs is
    another folder, without a limit, since each reading would take JAX's lock. None where JAX was given another folder
    (JAX_COMPILATION_CACHE_DIR) or was told to keep none (JAX_ENABLE_COMPILATION_CACHE=false).
    """
    config = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    folder = cache_folder() / ("programs" if processes == 1 else "programs-of-several") / processor_key()
    config.update("jax_compilation_cache_dir", str(folder))
    # Reading the small ones takes less than compiling them too, and a run has hundreds.
    config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if processes == 1 and importlib.util.find_spec("filelock") is not None:  # which JAX's limit needs
        config.update("jax_compilation_cache_max_size", MOST_BYTES)
    return folder
