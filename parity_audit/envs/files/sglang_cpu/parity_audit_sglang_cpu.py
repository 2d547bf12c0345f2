"""Lets SGLang import torchvision, which it does for image models, beside a torch that is built for the CPU.

torchvision on PyPI is a CUDA build. Its Python registers shapes for two of its compiled operators, which torch refuses where
nobody has declared them. They are declared here, without an implementation, just before torchvision is imported: a call of
one raises.
"""

import sys


class _BeforeTorchvision:
    def find_spec(self, name, path=None, target=None):
        """Part of the import system's search; finds nothing itself."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.parity_audit_torchvision_library = library  # declarations live as long as this object


sys.meta_path.insert(0, _BeforeTorchvision())
