"""Real models and data for the tests: from ../shared where it is, else the tests that need them are skipped."""

from __future__ import annotations

import gc
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from compiling import FASTER
from meshtune.cache import processor_key

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / ".pytest_cache" / "programs" / processor_key()
MOST_BYTES = 2 << 30  # of compiled programs; a folder that has grown beyond them is emptied
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # shared by tests, workers and the commands that tests start
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Tests start hundreds of processes, and read this one's modules in each of them: all read the bytecode of the first.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
MAPPED_REGIONS = 25_000  # after which compiled programs are freed


def pytest_configure(config: pytest.Config) -> None:
    """The fast tests, and the processes that they start, compile with FASTER; the other tiers compile as users do."""
    if not config.option.markexpr.startswith("not slow"):
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads wait for each other where every core has a worker
    if FASTER not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{FASTER} {os.environ.get('XLA_FLAGS', '')}".strip()
    if PROGRAMS.is_dir() and sum(path.stat().st_size for path in PROGRAMS.iterdir()) > MOST_BYTES:
        shutil.rmtree(PROGRAMS, ignore_errors=True)
    if config.getoption("dist", "no") != "no":  # this process only starts those that run the tests
        return
    gc.disable()  # until pytest_collection_finish: imported modules and collected tests stay
    import jax

    jax.devices()  # XLA reads its flags once: tests may change the variable


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempts imported modules and collected tests from garbage collection, and makes collections rarer.

    Tracing makes many objects and little garbage: looking through them all was a tenth of the processor time.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Frees compiled programs between files: Linux lets a process map 65,530 regions of memory, and each takes several.

    Beyond it the compiler ends in a segmentation fault. A slow file may come so far alone: there it is between tests.
    """
    maps = pathlib.Path("/proc/self/maps")
    same_file = nextitem is not None and nextitem.path == item.path
    if nextitem is None or not maps.exists() or (same_file and item.get_closest_marker("slow") is None):
        return
    with maps.open("rb") as regions:
        count = sum(1 for _ in regions)
    if count > (2 if same_file else 1) * MAPPED_REGIONS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """Returns the folder of shared test assets, next to the checkout."""
    path = pathlib.Path(os.environ.get("MESHTUNE_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip("needs the shared test assets (../shared, or MESHTUNE_SHARED)")
    return path


@pytest.fixture(scope="session")
def stories260k(shared: pathlib.Path) -> pathlib.Path:
    """A trained 260K-parameter Llama."""
    return shared / "assets/models/stories260K"


@pytest.fixture(scope="session")
def smollm2(shared: pathlib.Path) -> pathlib.Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, made once and kept in the user's cache."""
    cache = pathlib.Path(os.environ.get("MESHTUNE_TEST_CACHE", pathlib.Path.home() / ".cache/meshtune-tests"))
    model = cache / "SmolLM2-135M-Instruct"
    if not (model / "config.json").exists():
        tool = shared / "tools/make-smollm2"
        process = subprocess.run([sys.executable, str(tool), str(model)], capture_output=True, text=True)
        if process.returncode:
            pytest.skip(f"could not make SmolLM2: {process.stderr.strip()[-300:]}")
    return model
