"""Names in the database, without importing SQLAlchemy, which takes 0.2 s."""

SCHEMA = "holdfast"
HEAD = "0002"  # the newest migration; a test compares it with the migrations folder
WRITES = "holdfast-projector"  # application_name of connections that write the projection
