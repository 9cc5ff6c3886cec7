"""Training objectives: the loss of each stage, and what data it is computed from."""
