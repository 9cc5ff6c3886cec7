"""Pushing results to the Hugging Face hub: the account, the files and the model card."""
