"""`holdfast replay report`: one post-mortem as a page to look at, as Markdown, or as JSON."""
