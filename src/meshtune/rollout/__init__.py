"""Rollouts: completions that a model generates while it is trained, their rewards, and batches made of them."""
