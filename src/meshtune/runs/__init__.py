"""Runs on disk: their folders, their results and states, and what is exported of them."""
