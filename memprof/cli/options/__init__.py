"""Options shared by several verbs."""
