"""Grafana dashboards and alerts for operators, generated from Python (`make dashboards`)."""
