"""The journal's port and its implementations: NATS JetStream, memory, spool."""
