"""The cost of failures for streams, and how soon they are detected."""
