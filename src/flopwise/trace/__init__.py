"""Traces that a profiler recorded: one reader a format, one columnar table of events, interval arithmetic."""
