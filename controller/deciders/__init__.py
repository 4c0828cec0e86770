"""The controller's functional core: pure functions from facts to decisions, without I/O or clock."""
