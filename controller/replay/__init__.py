"""`holdfast replay`: rebuild, verify, time travel, and why something happened."""
