"""Pictures of a trace's memory over time."""
