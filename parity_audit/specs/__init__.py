"""Architecture specs: YAML to typed values, taps, edits and miniatures. Model knowledge lives in `model_specs/`, not here."""
