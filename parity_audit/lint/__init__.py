"""An engine's own config of released models against the constants of their specs: static, without weights, in seconds."""
