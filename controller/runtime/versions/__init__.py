"""The versions in a mixed fleet: what each process knows, and what is put in force."""
