"""One file for each kind of fix that can be written into a script."""
