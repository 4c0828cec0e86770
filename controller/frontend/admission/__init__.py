"""Admission control: which requests are admitted, which wait in the queue, and which are refused."""
