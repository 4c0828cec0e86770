"""The processes of a fleet. Each module composes one role, and `controller.cli` runs it."""
