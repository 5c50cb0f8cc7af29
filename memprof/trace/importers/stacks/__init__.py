"""What the stacks of imported allocations show: operators, phases, and the modules whose forward was running."""
