"""CUDA's own names of the public interface."""
