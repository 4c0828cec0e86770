"""What people look at who run a fleet: dashboards of Grafana, written in Python (`make dashboards`)."""
