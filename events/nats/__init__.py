"""The broker's client, in one home: connections, channels through the broker, bus."""
