"""The worker process: runs an engine and serves it to frontends. Never imports the controller."""
