"""The command line: a module per verb, which parses, calls one function and renders; `main` lists them.

Verbs import what they run inside their functions, so that `meshtune --help` does not wait for JAX.
"""
