"""`holdfast simulate`: runs the production deciders of a whole fleet through faults in virtual time."""
