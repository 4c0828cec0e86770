"""The request state machine, as pure functions."""
