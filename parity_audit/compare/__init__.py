"""Pure maths on captures: distances, the noise floor, divergences. Everything in float64, streamed."""
