"""Flags of the operator's commands, apart from the commands so that `--help` imports only flags."""
