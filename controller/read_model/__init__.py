"""The rows that the state store shows: how they follow from the fold, and how two of them differ."""
