"""Scaling hooks, which start and stop workers through a command or a Kubernetes scale subresource."""
