"""The shell: loops that read the journal, do what the deciders say, and report what came of it."""
