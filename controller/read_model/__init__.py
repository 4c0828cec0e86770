"""The rows of the state store: how they follow from the fold, and how two sets of them differ."""
