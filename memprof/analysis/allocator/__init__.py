"""What the caching allocator reserves for a step, and what a static planner would need."""
