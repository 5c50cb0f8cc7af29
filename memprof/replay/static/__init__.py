"""What a planner that knows a whole step ahead would need for it: liveness, sharing, offsets, and a lower bound."""
