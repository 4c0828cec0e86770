"""Operating system facilities that every process uses."""
