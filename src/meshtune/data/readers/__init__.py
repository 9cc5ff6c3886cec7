"""Readers of record files: each gives a lazy, random-access sequence of records with exact errors."""
