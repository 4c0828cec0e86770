"""The canary loop: sends canaries to workers, and records goldens and outcomes on the journal."""
