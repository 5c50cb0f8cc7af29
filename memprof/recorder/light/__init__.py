"""Records a whole run at a few per cent overhead: no dispatch mode, short stretches of events, counts in between."""
