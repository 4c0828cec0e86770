"""Who is let in, who waits, and to which worker a request goes."""
