"""A frontend's services for operators: the web console and its data sources."""
