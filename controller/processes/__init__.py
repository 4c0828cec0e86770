"""The processes of a fleet. One module composes each role's process, and `controller.cli` runs it."""
