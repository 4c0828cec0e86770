"""How `holdfast up` carries out what a planner proposes: it starts workers, and lets others leave in good order."""
