"""The contents of one recording: its peak, the parts of it, and the code that allocated them."""
