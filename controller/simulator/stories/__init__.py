"""Fixed scenarios that `holdfast simulate --scenario` runs to print a transcript."""
