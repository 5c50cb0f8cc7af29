"""What would lower the peak of an imported snapshot, by replay of its allocations under each change."""
