"""Detects faults of a worker's GPUs from NVML readings and Xids."""
