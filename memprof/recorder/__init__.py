"""Observes a training job from inside its process, and writes down what it saw."""
