"""Fixed scenarios, which are run to print a transcript."""
