"""What is timed: one module a column, each run in a process of its own."""
