"""Figures: columns in, plotly figures out; no Dash."""
