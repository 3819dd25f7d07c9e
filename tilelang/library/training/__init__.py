"""Functions with gradients for training: norms, softmax, cross-entropy, gated activations, grouped GEMM."""
