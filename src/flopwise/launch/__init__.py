"""Starts an unmodified script, or any command, so that the meter finds its way in. Knows nothing of torch."""
