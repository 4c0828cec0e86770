"""The request state machine: pure."""
