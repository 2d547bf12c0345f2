"""The command line: parse, call the api, print the report, exit. No logic, and no torch before a command runs."""
