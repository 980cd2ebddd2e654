"""The fixes, one a file. They do not know each other; `flopwise.fixes.registry` lists them in order."""
