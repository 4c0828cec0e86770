"""Metrics of a process's journal connection, and Prometheus scrape targets."""
