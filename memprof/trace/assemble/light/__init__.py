"""Assembles light recordings: the whole run in counts, its last stretch in full."""
