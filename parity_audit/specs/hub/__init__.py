"""Access to the model hub through the hub library: find models in the user's hub cache, list repositories and download files."""
