//! Kubernetes objects to and from the model; the index of pods and nodes; watches
