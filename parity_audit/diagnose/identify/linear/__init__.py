"""Matrix products: what was done to weight, bias or input."""
