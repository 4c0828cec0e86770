"""The imperative shell: loops that read the journal, apply decisions, and report the outcome."""
