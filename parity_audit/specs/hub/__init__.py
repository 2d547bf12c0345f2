"""The model hub: what is in the user's cache of it, what it has, and how that is fetched; the hub library does the talking."""
