"""A policy that is not part of memprof and has no prediction of its own: a dry run predicts it."""
