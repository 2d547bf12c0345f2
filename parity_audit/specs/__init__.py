"""Read architecture specs (YAML) and derive typed knob values, taps, edits and miniature checkpoints from them.

What is known about each model is in `model_specs/`, not in this package.
"""
