"""Facts about devices: the table of accelerators, this host, and the ceilings measured on it."""
