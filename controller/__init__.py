"""The control side of a fleet: controller, projector, planner, notifier, frontends and commands."""
