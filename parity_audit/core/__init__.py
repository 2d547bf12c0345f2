"""Frozen types, errors, wire messages and the capture manifest. Standard library only, Python >= 3.10.

This package also runs inside the workers, on old stacks, so it may import nothing but the standard library.
"""
