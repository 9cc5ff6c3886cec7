"""Completions that online stages generate, score and are trained on."""
