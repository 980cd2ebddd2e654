"""Several ranks of one job: what waits for whom, what moves twice, and which of the traces can be believed."""
