"""Detects and masks secrets in command lines and sentences."""
