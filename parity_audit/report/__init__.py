"""Reports: pure functions of the finished `core.report.Report`, plus the schema of report.json."""
