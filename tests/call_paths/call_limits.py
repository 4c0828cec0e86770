"""Limits per path: the number of files, and of pairs of files that call each other both ways."""

# (files, two-way pairs), as measured. They may only be lowered, towards the targets.
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
