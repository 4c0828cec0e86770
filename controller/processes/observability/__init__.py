"""Lists the fleet's processes as scrape targets for Prometheus."""
