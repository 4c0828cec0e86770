"""One request while it is served: its prompt, its overrides, its failures and what may still be tried."""
