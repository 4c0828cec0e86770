"""`holdfast replay report`: a post-mortem as an HTML page, as Markdown or as JSON."""
