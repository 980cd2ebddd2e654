"""The causes, one file each: a function `find` from the evidence to findings, and the limits that it uses."""
