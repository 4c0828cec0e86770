"""Admission control: admits requests, queues them for a worker, or refuses them."""
