"""Who called an operator: modules, stacks, and functions of torch seen through."""
