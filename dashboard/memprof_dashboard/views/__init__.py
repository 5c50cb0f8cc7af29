"""What the pages show: prepared from recordings, without a component of the page."""
