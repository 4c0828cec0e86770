"""The processes of a fleet. Each module composes one role from its parts; `controller.cli` runs it."""
