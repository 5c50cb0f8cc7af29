"""The output pages of the verbs, as text, Markdown and HTML."""
