"""What would have happened under another policy? The recorded observations are decided again, by the same deciders."""
