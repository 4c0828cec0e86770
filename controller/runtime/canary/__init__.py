"""The canary loop: probes workers, records goldens, and reports the outcomes as facts."""
