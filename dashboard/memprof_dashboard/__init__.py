"""The dashboard: a recording's memory over time, what it is made of, and which plan makes it fit."""
