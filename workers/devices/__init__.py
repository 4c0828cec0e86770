"""Detects faults of a worker's GPUs from NVML readings and Xids (error events of the NVIDIA driver)."""
