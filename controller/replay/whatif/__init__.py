"""What-if analysis: decides recorded observations again with the same deciders under another policy."""
