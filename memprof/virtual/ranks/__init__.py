"""Dry runs of one rank of a distributed job: the other ranks do not exist."""
