"""The pages that verbs print, as text, Markdown and HTML."""
