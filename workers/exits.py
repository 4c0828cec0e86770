"""How a worker's process ends: 0 in good order, 1 it failed, 2 a mistake of the user, or FELL."""

USAGE = 2
FELL = 4
"""Its engine died, or the fleet held it for dead; it has said so itself (`WorkerLeft`)."""
