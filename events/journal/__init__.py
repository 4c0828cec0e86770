"""The journal's interface, and its implementation on NATS JetStream."""
