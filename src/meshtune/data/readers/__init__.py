"""Readers of data files. Each gives a lazy sequence of records with random access, and errors that name the place."""
