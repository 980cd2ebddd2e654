"""Precision: mixed dtypes that are seen to take effect, and a loss scale that follows the gradients."""
