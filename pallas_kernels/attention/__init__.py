"""Flash attention on Hopper: what a call is, its references, its kernels."""
