"""A simulated machine: a job runs on tensors without data, so that the recorder sees a step without any computation.

Where nothing else is said, ``func`` is an operator, ``packet`` an operator with all of its overloads, ``args`` and
``kwargs`` its arguments, and ``result`` is what it returns.
"""
