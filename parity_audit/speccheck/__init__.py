"""Is a spec right? Audits its miniature on every backend that can run it, and plants errors that must be named."""
