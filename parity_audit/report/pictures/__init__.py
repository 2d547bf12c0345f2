"""Charts as SVG text: functions of numbers, without a plotting library and without scripts."""
