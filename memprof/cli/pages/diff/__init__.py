"""The output of `memprof diff`, as text, Markdown and JUnit."""
