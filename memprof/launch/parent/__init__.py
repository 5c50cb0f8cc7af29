"""The parent process: starts the job, monitors it from outside, and packs the recording."""
