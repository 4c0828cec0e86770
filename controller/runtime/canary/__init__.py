"""The canary loop: probes, goldens, and the facts that they become."""
