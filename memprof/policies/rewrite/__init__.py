"""Tools to rewrite a step for a prediction."""
