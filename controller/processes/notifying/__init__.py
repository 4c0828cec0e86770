"""The notifier as a process, and the flags by which `holdfast up` starts one."""
