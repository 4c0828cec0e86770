"""What-if analysis: runs the deciders again on recorded observations, under a changed policy."""
