"""vLLM worker extension that loads new weights for the bare loop. vLLM imports this module in its worker process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors.torch import load_file
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class ReloadExtension:
    """Methods that vLLM adds to its worker class."""

    model_runner: GPUModelRunner
    model_config: ModelConfig

    def reload_from(self, path: str) -> None:
        """Load a safetensors file into the running model, without verification."""
        model = self.model_runner.get_model()
        initialize_layerwise_reload(model)
        model.load_weights(load_file(path).items())  # pyright: ignore[reportCallIssue]
        finalize_layerwise_reload(model, self.model_config)
        for module in model.modules():
            if isinstance(module, ParallelLMHead):  # on the CPU a tied head keeps a packed copy of its old weight
                module.quant_method.process_weights_after_loading(module)
