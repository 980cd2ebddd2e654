"""The ledger of a step: every instant of the device on one line."""
