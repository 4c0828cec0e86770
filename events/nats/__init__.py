"""The broker client: connections, byte-stream channels and the message bus."""
