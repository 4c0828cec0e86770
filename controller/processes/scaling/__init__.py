"""Scaling in `holdfast up`: starts workers and stops them gracefully, as the planner proposes."""
