//! What the view says of nodes and pods.

mod free;
