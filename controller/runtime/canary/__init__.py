"""The canary loop: sends canaries to workers, records goldens, and reports the outcomes as facts."""
