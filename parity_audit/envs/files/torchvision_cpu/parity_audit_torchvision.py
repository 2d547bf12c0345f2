"""Lets engines import torchvision, which they do for models of images, beside a torch that is built for the CPU.

torchvision on PyPI is a CUDA build. Its Python registers shapes for two of its compiled operators, which torch refuses where
nobody has declared them. They are declared here, without an implementation, just before torchvision is imported: a call of
one raises. A build for the CPU declares its own.
"""

import sys

CPU_BUILD = "+cpu"


class _BeforeTorchvision:
    def find_spec(self, name, path=None, target=None):
        """Part of the import system's search; finds nothing itself."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            import importlib.metadata

            if importlib.metadata.version("torchvision").endswith(CPU_BUILD):
                return
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.parity_audit_torchvision_library = library  # declarations live as long as this object


sys.meta_path.insert(0, _BeforeTorchvision())
