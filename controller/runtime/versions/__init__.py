"""Which process of a mixed fleet knows what, and what is put in force."""
