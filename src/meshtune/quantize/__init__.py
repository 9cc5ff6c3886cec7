"""Quantised weights, as pytrees that replace the weights in a parameter tree."""
