"""The panel next to the timeline: what is alive at the cursor, as a table or a picture, and one storage in full."""
