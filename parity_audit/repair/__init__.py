"""From findings to patches: choose, render, apply and judge again; and the proof on the reference where nothing can be patched."""
