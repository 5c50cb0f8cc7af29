"""The planners' input: the graph of a step, and its schedules."""
