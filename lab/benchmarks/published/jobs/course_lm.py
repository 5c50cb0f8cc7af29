"""Runs forwards and backwards of the course's language model on 32 sequences of 256 tokens."""

from families.course_lm import accumulate

if __name__ == "__main__":
    accumulate(batch=32)
