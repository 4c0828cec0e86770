"""Scaling hooks that start and stop workers without `holdfast up`: a command, or a Kubernetes scale."""
