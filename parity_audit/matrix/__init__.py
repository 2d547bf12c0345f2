"""Many audits as one table of models by backends and releases. Each cell is a card on disk, which is reused if current."""
