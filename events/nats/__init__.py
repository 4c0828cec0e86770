"""The client of the NATS broker: connections, byte-stream channels and the message bus."""
