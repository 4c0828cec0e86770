"""The flags of the operator's commands, in modules of their own so that `--help` imports no command."""
