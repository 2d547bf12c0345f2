"""Compare an engine's own config of released models with the constants of their specs: static, without weights, in
seconds."""
