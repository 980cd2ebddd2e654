"""A/B trials of step time: which arm runs when, and what the pairs say (docs/trials.md)."""
