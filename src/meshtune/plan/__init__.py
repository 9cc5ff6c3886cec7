"""Knowing before running: what machines hold, and what a run needs of them."""
