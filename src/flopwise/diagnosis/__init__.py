"""From records to findings: each cause looks at the same evidence and knows nothing of the others. Needs no torch."""
