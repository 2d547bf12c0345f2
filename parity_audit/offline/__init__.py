"""What works on captures on disk alone: no model is loaded, no engine is started."""
