"""The journal's port, and its implementations on NATS JetStream and in memory."""
