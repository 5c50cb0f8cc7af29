error = RuntimeError("inside")
error.add_note("with a note")
raise ExceptionGroup("several", [error, TypeError("another")])
