"""Attention that a model writes out, fused in the graph that is compiled."""
