"""Cost and yield of serving: tokens, requests, starts, thousands of workers."""
