"""What failures cost those who stream, and how soon they are found."""
