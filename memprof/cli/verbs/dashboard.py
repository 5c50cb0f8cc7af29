"""`memprof dashboard`: recordings in a browser. The page is a separate package, which needs dash at run time."""

from __future__ import annotations

import importlib

import click

#: Looked up by name: no import in memprof leads to dash.
dashboard: click.Command = importlib.import_module("memprof_dashboard.command").dashboard
