"""What a fleet's supervisor does about what was lost while nobody looked: tables, and the journal itself."""
