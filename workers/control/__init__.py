"""Handles the controller's commands to a worker, and the worker's registration and heartbeats."""
