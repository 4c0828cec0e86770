"""What serving costs and yields: tokens, requests, starts, thousands of workers."""
