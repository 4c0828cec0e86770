"""The planner process, which reports capacity and proposes numbers of workers."""
