"""Attention backward on sm_90a: delta, the five products of dQ, dK and dV, and dQ in 16 bits."""
