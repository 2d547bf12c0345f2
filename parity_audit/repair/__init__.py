"""From findings to patches: choose, render, apply and judge again; if nothing can be patched, prove the diagnosis on the
reference."""
