"""Assembles light recordings: counters for the whole run, full detail for the last stretch."""
