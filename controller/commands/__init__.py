"""The commands for a running fleet, one module per command or family of commands."""
