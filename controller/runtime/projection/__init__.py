"""The projector: from events to rows, each event once."""
