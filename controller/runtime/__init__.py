"""The controller's loops: they read the journal, carry out decisions and report the outcomes."""
