"""What every planner works on: the graph of a step, and schedules of it."""
