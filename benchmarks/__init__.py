"""Measurements of attention on a GPU beside its peers: what is measured, how, and the rows kept (README.md)."""
