"""Stands for SGLang's compiled CPU kernels, which no package index has, so that modules which import them can be imported.

SGLang's torch-native path calls none of them. A call raises.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a compiled kernel, and this environment has none")

    missing.__name__ = name
    return missing
