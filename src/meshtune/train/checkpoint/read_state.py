"""Arrays of a checkpoint, without the run that wrote it and without touching its directory."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Mapping

import numpy as np

from meshtune.digests import DamagedError, damage_error, find_damage, read_digests
from meshtune.errors import UserError

FIX = "take another state that is kept"


def read_arrays(state: pathlib.Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint's folder `state` with these names and shapes, whole, whatever mesh wrote them.

    Raises: DamagedError for files that changed since they were written, UserError for other arrays.
    """
    import orbax.checkpoint as ocp

    state = state.absolute()  # Orbax looks elsewhere for a relative one
    digests, _ = read_digests(state)
    if damage := find_damage(state, digests):
        raise damage_error(state, damage, FIX)
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of a file that a whole checkpoint has elsewhere
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    try:
        saved = reader.metadata(state).item_metadata.tree  # pyright: ignore[reportOptionalMemberAccess]
        for name, shape in shapes.items():
            if name not in saved or tuple(saved[name].shape) != shape:
                actual = tuple(saved[name].shape) if name in saved else "absent"
                raise UserError(
                    f"the checkpoint is not of this run's recipe: '{name}' is {actual} there, "
                    f"and {shape} by the recipe",
                    where=str(state.parent),
                    fix=FIX,
                )
        items = {name: saved[name] for name in shapes}
        as_numpy = dict.fromkeys(items, ocp.RestoreArgs(restore_type=np.ndarray))
        return reader.restore(state, ocp.args.PyTreeRestore(items, restore_args=as_numpy, partial_restore=True))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DamagedError(f"the checkpoint cannot be read: {reason}", where=str(state.parent), fix=FIX) from error
