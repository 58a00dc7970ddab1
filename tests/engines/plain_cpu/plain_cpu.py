"""A vLLM plugin for tests: its CPU engine keeps linear weights as they are, as a GPU's engine does.

Otherwise it packs them and drops the parameter, so that no plan is possible. The folder is put on PYTHONPATH.
"""


def register() -> None:
    import torch
    import vllm.model_executor.layers.utils as utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
