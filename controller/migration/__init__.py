"""What moving a request costs, over which link, and who takes it: as pure as the deciders."""
