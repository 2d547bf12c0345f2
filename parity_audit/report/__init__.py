"""Draw finished reports in every output format, write and read their files, and generate the schema of report.json."""
