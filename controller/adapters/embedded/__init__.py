"""Starts nats-server, PostgreSQL and Prometheus for `holdfast up`, unless external ones are given."""
