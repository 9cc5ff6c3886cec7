"""XLA's compilers for accelerators that are not here, each in a process of its own."""
