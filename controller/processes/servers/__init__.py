"""The servers of a fleet, broker and database: started and kept alive, or of somebody's own."""
