"""The worker process: runs an engine and serves it to frontends. It never imports the controller."""
