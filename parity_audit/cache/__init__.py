"""The cache directory: its location, locks on its files, and checks that the files are still as they were written."""
