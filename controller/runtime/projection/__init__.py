"""The projector: projects journal events to rows, each event exactly once."""
