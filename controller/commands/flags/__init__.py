"""The flags of the operator's commands. These modules import no command, because `--help` needs none."""
