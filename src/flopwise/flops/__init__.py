"""FLOP formulas: shapes in, FLOPs and bytes out. One table for the live run, traces and planning; no torch.

A multiply-add is two FLOPs. Bias adds, pointwise work, norms, softmax and copies are zero FLOPs: they cost time and
bytes, and the model FLOPs of the literature leave them out. The conventions are in docs/flops.md.
"""
