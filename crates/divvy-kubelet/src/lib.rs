//! The kubelet's device plugin API v1beta1, its checkpoint and podresources; knows nothing of GPUs
