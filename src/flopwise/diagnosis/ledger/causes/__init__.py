"""What the steps of a ledger lose time to: one file a cause, none knows another."""
