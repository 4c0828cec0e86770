"""Scaling in `holdfast up`: starts and gracefully stops workers as the planner proposes."""
