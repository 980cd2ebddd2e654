"""Batches without their padding: what is padded, one row of all tokens, attention within sequences, outputs restored."""
