"""Plans: policies in their order, plan files, and predictions."""
