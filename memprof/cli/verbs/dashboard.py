"""`memprof dashboard`: recordings in a browser. The page is a package of its own, which needs dash once it runs."""

from __future__ import annotations

import importlib

import click

#: Found by name: no import of memprof's leads to dash.
dashboard: click.Command = importlib.import_module("memprof_dashboard.command").dashboard
