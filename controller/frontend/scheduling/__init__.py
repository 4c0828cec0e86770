"""Scheduling: the worker that each request is sent to, worker pools, KV room and traffic reports."""
