"""The operator's commands, with one module per command or group of commands."""
