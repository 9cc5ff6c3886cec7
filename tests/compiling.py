"""XLA's flags with which tests compile for a CPU in little processor time: the same programs, slower code."""

import importlib.metadata

# Without LLVM's optimisations, and in one part: parts of a program are for compilers with idle cores.
FASTER = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
_JAX = tuple(int(part) for part in importlib.metadata.version("jax").split(".")[:2])
if _JAX < (0, 11):  # XLA ends the process at a flag that it does not know
    FASTER += " --xla_cpu_use_fusion_emitters=false"
