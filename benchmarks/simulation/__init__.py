"""Accuracy of simulated engines, synthetic traces and replays."""
