"""Pushing results to the Hugging Face hub: the account, what is sent, and the model card."""
