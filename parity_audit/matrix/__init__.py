"""Many audits as one table: models by backends and releases, a card for each, kept on disk and run again only when asked."""
