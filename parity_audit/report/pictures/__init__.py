"""Draw charts as SVG text from numbers, without a plotting library and without scripts."""
