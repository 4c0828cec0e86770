"""The projector: writes journal events to the state store, each event exactly once."""
