"""From allocation events to storages: what was alive when, and what for."""
