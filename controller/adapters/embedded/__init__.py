"""The real nats-server and PostgreSQL that `holdfast up` starts where it is given none."""
