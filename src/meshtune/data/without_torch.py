"""Keeps torch out of commands where it is installed: transformers imports it wherever it can, which takes seconds.

Commands use transformers only for tokenizers and chat templates. A program that imports `meshtune` keeps its torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types


def leave_torch_out() -> None:
    """Makes transformers, once it is imported, do without torch for the rest of the process. Other packages still can
    import it. Does nothing where torch or transformers is imported already."""
    if not {"torch", "transformers"} & sys.modules.keys():
        sys.meta_path.insert(0, _TransformersFinder())


class _TransformersFinder(importlib.abc.MetaPathFinder):
    """Finds transformers as the others do, with torch hidden while it decides what it can use. It is used once."""

    def find_spec(
        self, name: str, path: object = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "transformers":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_without_torch(module: types.ModuleType) -> None:
            hidden = "torch" not in sys.modules
            if hidden:
                sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]: how Python says that there is none
            try:
                execute(module)
                module.utils.is_torch_available()  # which remembers its answer
            finally:
                if hidden:
                    del sys.modules["torch"]

        spec.loader.exec_module = execute_without_torch
        return spec
