"""What a frontend has for its operators: the console, and what it needs of this host."""
