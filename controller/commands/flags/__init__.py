"""Flags of the operator's commands, without the imports that running them needs."""
