"""Descriptions, in words, of how a component's output differs from the right one, where no constant explains it."""
