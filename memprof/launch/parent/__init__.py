"""The process that starts the job, watches it from outside, and packs what it left."""
