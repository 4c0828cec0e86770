"""The accelerators under a worker: NVML, Xids, and what they mean."""
