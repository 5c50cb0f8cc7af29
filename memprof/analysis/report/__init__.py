"""What is read off one recording: its peak, what it is made of, and who made it."""
