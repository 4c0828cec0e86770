"""Names in the database, for those who need no more than names (importing SQLAlchemy takes a fifth of a second)."""

SCHEMA = "holdfast"
HEAD = "0002"  # the newest migration; a test compares it with the migrations folder
WRITES = "holdfast-projector"  # application_name of connections that write the projection
