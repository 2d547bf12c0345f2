"""Rollout files of training frameworks: read into completions, written per token. No engine is needed for them."""
