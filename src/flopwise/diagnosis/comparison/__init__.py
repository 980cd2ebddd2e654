"""Two measurements of a job held against each other."""
