"""Attention from its written formulas in plain torch: the backend of CPU tensors, and the oracle that kernels are held to.

Clarity before speed: scores are materialised, in fp32 (fp64 for fp64 inputs). `dense` holds the formulas; `varlen` and
`kvcache` cut sequences out of their layouts and call it; `online` is the blocked algorithm, for readers.
"""
