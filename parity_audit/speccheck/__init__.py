"""Checks whether a spec is right: audits its miniature on every backend that can run it, and plants errors that must be named."""
