"""Operating system facilities that every process uses, such as logs and open-file limits."""
