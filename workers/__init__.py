"""One inference worker around an engine. Never imports the controller."""
