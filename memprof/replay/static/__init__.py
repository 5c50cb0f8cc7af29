"""Memory of a static planner that sees a whole step ahead: liveness, sharing, offsets, and a lower bound."""
