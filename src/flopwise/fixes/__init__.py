"""Fixes: what can be changed in a running training process, each one on a measured cause and with a way back."""
