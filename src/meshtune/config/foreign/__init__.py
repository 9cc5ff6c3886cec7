"""Recipes of other fine-tuning tools: which tool a file is for, and its translation to a recipe of ours."""
