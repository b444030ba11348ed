"""Attention as torch operators, with fake implementations and autograd: what the public functions call."""
