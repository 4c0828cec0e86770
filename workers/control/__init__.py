"""A worker's commands from the controller, and its membership of the fleet."""
