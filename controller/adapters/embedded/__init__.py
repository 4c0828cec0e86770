"""The real nats-server and PostgreSQL that `holdfast up` starts if no external ones are given."""
