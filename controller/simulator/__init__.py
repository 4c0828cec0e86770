"""`holdfast simulate`: whole fleets through faults in virtual time, with production's own deciders."""
