"""What accelerators hold and how fast they are, from their makers' data sheets."""
