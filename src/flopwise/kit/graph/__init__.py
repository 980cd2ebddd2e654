"""Graphs: compiled regions, folded constants, and whole steps captured once and replayed."""
