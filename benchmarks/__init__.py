"""Every figure that Holdfast claims, with the command that measures it: see README.md here."""
