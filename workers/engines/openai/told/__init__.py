"""What a server tells of itself, beside its model and version."""
