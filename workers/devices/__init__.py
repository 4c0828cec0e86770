"""The accelerators of a worker: NVML, Xids, and the faults derived from them."""
