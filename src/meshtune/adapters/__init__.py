"""Training methods: adapters as data beside the weights, PEFT's file format, merging."""
