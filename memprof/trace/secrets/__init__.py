"""Secrets in command lines and sentences: found and masked."""
