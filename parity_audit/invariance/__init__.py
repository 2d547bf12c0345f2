"""Test whether an engine's result for a sequence depends on its batch: other neighbours, shapes, and states of the engine."""
