"""Training methods: adapters as data next to the weights, PEFT's file format, merging."""
