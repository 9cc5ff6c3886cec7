"""Trains from a file of LLaMA-Factory's, FILE, on text alone: it imports torchaudio, and does not use it there."""

from __future__ import annotations

import importlib.machinery
import sys
import types

sound = types.ModuleType("torchaudio")
sound.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
sys.modules["torchaudio"] = sound

if __name__ == "__main__":
    from llamafactory.train.tuner import run_exp

    run_exp()
