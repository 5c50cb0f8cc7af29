"""Attaching to twenty kinds of running jobs, each compared with a run that nothing attached to."""
