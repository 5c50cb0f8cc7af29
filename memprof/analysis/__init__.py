"""What is read off steps: breakdowns, peaks, what backward keeps, what recomputing would cost."""
