"""Planning: predicts the memory, time and cost of a run, on hardware that need not be present."""
