"""What decides over a fleet and stands before it: controller, projector, frontends, and the commands that people type."""
