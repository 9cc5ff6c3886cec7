"""Runs on disk: their folders, their results, states and exports."""
