"""Who is let in before workers that have enough to do, and who is served first? By deadlines, pure."""
