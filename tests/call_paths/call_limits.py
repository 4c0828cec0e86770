"""How many files a way may run in, and how many pairs of these may call each other both ways."""

# (files, two-way pairs), as measured. They go down to the targets, and never up.
LIMITS = {
    "completion": (55, 0),
    "conviction": (65, 0),
    "drain": (110, 4),
    "canary": (43, 1),
    "projection": (25, 0),
    "what-if": (48, 1),
}
TARGETS = {
    "completion": (55, 0),
    "conviction": (65, 0),
    "drain": (110, 4),
    "canary": LIMITS["canary"],
    "projection": LIMITS["projection"],
    "what-if": LIMITS["what-if"],
}
